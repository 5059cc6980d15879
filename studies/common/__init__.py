"""What all studies share: seeds, statistics, tables, processes, publishing, the command line."""
