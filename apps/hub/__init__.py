"""The Hugging Face Hub, and other libraries that read or write diffbit's models."""
