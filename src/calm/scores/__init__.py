"""Losses and metrics as pure functions of tensors."""
