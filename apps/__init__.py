"""Apps: what people do with the road from checkpoint to tokens, each in a folder that one may ignore while working on
that road.

An app imports only the faces of the core's rooms (their `__all__`), and no other app. Its commands, if it has any, are
the functions of command.py that EXAMPLES there names; the command line finds them by listing this folder. Nothing in
the core imports an app.
"""
