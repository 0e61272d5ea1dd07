"""FSDP2: parameters, gradients, and optimizer states spread over the processes of torchrun.

Under `fully_shard` only `forward` gathers a module's parameters, so training enters a model through it. A model names
other methods that are called on it in `fsdp_methods`, and the modules that are groups of their own in `fsdp_units`; the
rest, a tied embedding above all, stays in the root's group.
"""

from typing import Any

from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from calm.distributed import World


def shard(model: Any, world: World) -> None:
    """Shard a model over all processes; a single process leaves it as it is."""
    if world.size == 1:
        return
    for module in (*model.fsdp_units(), model):
        fully_shard(module)
        for method in getattr(module, "fsdp_methods", ()):
            register_fsdp_forward_method(module, method)
