"""What the engine does right now, for the page: as JSON, in plain words, pushed while somebody looks.

words.py   the sentences
schema.py  EngineView, what is sent
view.py    from the engine's view of itself to that
feed.py    asks the engine, at most once a second; the route
"""
