"""Suite `gpu`: how near decoding with everything on one device comes to what that device allows.

An iteration of decoding reads all weights once and the KV of all its requests, and multiplies every weight
once per request. Reading bounds small batches, multiplying large ones: the longer of the two times, at rates
measured in between, is the limit. See rig.py for what counts, and what is timed.
"""
