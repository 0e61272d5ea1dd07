"""How close to the machine's limits training, generation and evaluation are: what `calm bench` measures."""
