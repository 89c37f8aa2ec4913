"""A server with the interface of OpenAI."""
