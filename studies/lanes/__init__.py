"""Two residual lanes and what came with them in a public record: its mechanisms rebuilt in a small model, and its claims tested.

In the order in which one reads them:

    config, model                       blocks, loops and wirings of the lanes as data; the model that they describe
    text, optim, train, arms            the corpus, Muon, the training of one arm, and the table of arms
    bpb, ttt, tapin, tapin_index        scores: sliding windows, test-time training, hints from earlier text
    gptq, size                          six-bit matrices, and the bytes that they take
    symmetry, quarantine_symmetry       whether equal starts receive equal gradients: lanes, and this project's adapters
    paths, growth                       gradients by path; growth of an error over the passes of a loop
    settings, measures, instruments     what is set; what is measured on trained models, and on random ones
    study                               the jobs that make a study's folder, and what is read from it
    estimates, claims, report, figures  artifacts to numbers, numbers to verdicts, tables and figures
    cli                                 ``python -m studies.lanes``
"""
