"""Files, their formats, downloads, progress bars and errors: what every other room uses, and no room of its own needs.

errors           DiffbitError, the one sentence that a user sees for bad input
files, durable   folders and files that are written beside and renamed into place
safetensors, gguf, sentencepiece, tokenizer_files    readers of other projects' formats
hub              downloads of models by name
progress         progress bars and quiet mode
processes        the processes of torchrun that share work
drawing, page    charts, and pages of HTML, in one style
"""
