"""World: one without any wrapper, many with FSDP2 under torchrun.

Under `fully_shard` only `forward` gathers a module's parameters, so training enters a model through it; other methods
that are used on a sharded model are registered. A model says with `sharded_parts` which of its modules are groups of
their own; what is left, a tied embedding above all, stays together in the root's group.
"""

from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from calm.distributed import World
from calm.models.backbone import transformer_layers


def shard(model: nn.Module, world: World) -> None:
    """Spread parameters, gradients and optimizer state over the processes; a single process is left as it is."""
    if world.size == 1:
        return
    parts = model.sharded_parts() if hasattr(model, "sharded_parts") else transformer_layers(model)  # pyright: ignore
    for part in (*parts, model):
        fully_shard(part)
        for method in getattr(part, "entered_by", ()):
            register_fsdp_forward_method(part, method)


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor, gathered; others as they are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # pyright: ignore
