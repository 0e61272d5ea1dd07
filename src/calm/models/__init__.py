"""The networks: the autoencoder of §2, the language model of §3."""
