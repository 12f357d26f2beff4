"""HTTP: the OpenAI and Anthropic interfaces, the chat page, and the one thread that runs the model."""
