"""Apps: what people do with the road from checkpoint to tokens, each in a folder that one may ignore while working on
that road.

An app imports only the faces of the core's rooms (their `__all__`), and no other app. Its command is the function of
its name in command.py; the command line finds it by listing this folder. Nothing in the core imports an app.
"""
