"""Text from models: chunk by chunk."""
