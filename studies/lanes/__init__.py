"""Two residual lanes and what came with them in a public record: its mechanisms rebuilt in a small model, and its claims tested.

In the order in which one reads them:

    config, model                    blocks, loops and wirings of the lanes as data; the model that they describe
    text, optim, train, arms         the corpus, Muon, the training of one arm, and the table of arms
    scoring                          sliding windows, test-time training, hints from earlier text
    quantization                     six-bit matrices, the bytes that they take, growth of an error over the passes of a loop
    gradients                        gradients by path; whether equal starts receive equal ones: lanes, and this project's adapters
    settings, measures, instruments  what is set; what is measured on trained models, and on random ones
    study                            the jobs that make a study's folder, and what is read from it
    report                           artifacts to numbers, numbers to verdicts, tables and figures
    cli                              ``python -m studies.lanes``
"""
