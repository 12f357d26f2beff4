"""What a Qwen3.5 is: its configuration, the plan of a forward pass, its tokenizer and chat format."""
