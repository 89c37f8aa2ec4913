"""A runtime of our own for artifacts in WebAssembly; README.md."""
