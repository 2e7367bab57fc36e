"""The engine's present work for the page: as JSON, in plain words, sent while a page is open.

words.py   the sentences
schema.py  EngineView, the JSON
view.py    from the engine's view of itself to that
feed.py    asks the engine, at most once a second
"""
