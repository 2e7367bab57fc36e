"""Decoders without an implementation in this project: cut out of the code of `transformers`.

Their code is exported as a graph in which attention is one operator (`graph`). The graph is cut there into
stages for the executor (`cut`), as in Lamina (section 5.3). A run without numbers determines a model's sizes
(`spec`), long before the model is loaded.
"""
