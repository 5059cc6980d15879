"""Code shared by all studies: seeds, statistics, tables, processes, publishing, the command line."""
