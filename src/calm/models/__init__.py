"""The networks: the autoencoder of §2."""
