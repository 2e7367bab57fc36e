"""Decoders that nobody has written here: cut out of the code that `transformers` has for them.

Their code is exported as a graph in which attention is one operator (`graph`), and the graph is cut there
into the stages that an executor wants (`cut`), as Lamina does (section 5.3). What a model is like is found
out by a run without numbers (`spec`), long before it is loaded.
"""
