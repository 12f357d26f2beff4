"""Where bytes become canonical tensors: GGUF, safetensors, the Hub, block formats, synthetic models."""
