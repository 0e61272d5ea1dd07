"""FSDP2: parameters, gradients, and optimizer states spread over the processes of torchrun.

Parameters are gathered for `forward`, and for the methods that a module names in `fsdp_methods`. A model names the
modules that are groups of their own in `fsdp_units`, each with whether it is resharded after its forward pass, and what
every process keeps whole in `fsdp_replicated`. With a shard size below the number of processes this is HSDP: groups of
that many processes, usually a node, share one copy of the model.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import TorchFunctionMode

from calm.distributed import World
from calm.errors import ConfigError


def shard(model: Any, world: World, shard_size: int | None = None, precision: str = "fp32") -> None:
    """Shard a model; a single process leaves it as it is.

    Args:
        model: a model of `calm`, which may be on the meta device.
        shard_size: processes that share one copy of the model; by default all.
        precision: "bf16": parameters are gathered in bf16, gradients are reduced in fp32.
    """
    if world.size == 1:
        return
    options: dict[str, Any] = {"mesh": _mesh(world, shard_size or world.size)}
    if precision == "bf16":  # autocast decides which operations run in bf16
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    ignored = {parameter for module in model.fsdp_replicated() for parameter in module.parameters()}
    for module, reshard in model.fsdp_units():
        fully_shard(module, reshard_after_forward=reshard, **options)
    fully_shard(model, ignored_params=ignored, **options)
    for module in model.modules():
        for method in getattr(module, "fsdp_methods", ()):
            register_fsdp_forward_method(module, method)


def _mesh(world: World, shard_size: int) -> Any:
    kind = world.device.type
    if shard_size == world.size:
        return init_device_mesh(kind, (world.size,))
    if world.size % shard_size:
        raise ConfigError(
            f"train.shard_size must divide the number of processes, but {world.size} is not a multiple of {shard_size}"
        )
    return init_device_mesh(kind, (world.size // shard_size, shard_size), mesh_dim_names=("replicate", "shard"))


TORCH_LAYERS = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)
RANDOM_INITIALIZATIONS = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, Tensor.normal_, Tensor.uniform_)


class CpuInitialization(TorchFunctionMode):
    """Draws random weights on the CPU, tensor by tensor, and keeps of a sharded one what belongs to this process.

    So initial weights depend neither on the device nor on the number of processes.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in RANDOM_INITIALIZATIONS:
            parameter, *rest = args or [kwargs.pop("tensor")]
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            return assign(parameter, func(whole, *rest, **kwargs))
        if func is Tensor.copy_ and isinstance(args[0], DTensor):
            return assign(args[0], args[1])
        return func(*args, **kwargs)


def assign(parameter: Tensor, whole: Tensor) -> Tensor:
    """Set a parameter, sharded or not, to a whole tensor."""
    if not isinstance(parameter, DTensor):
        return parameter.data.copy_(whole)
    mesh, placements = parameter.device_mesh, parameter.placements
    own = distribute_tensor(whole.to(mesh.device_type), mesh, placements, src_data_rank=None)
    parameter.to_local().copy_(own.to_local())
    return parameter


def _tied_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places (module, name) of each parameter that has several; `to_empty` would give each its own."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        parent, _, name = path.rpartition(".")
        places.setdefault(parameter, []).append((model.get_submodule(parent), name))
    return [found for found in places.values() if len(found) > 1]


def initialize(model: Any, fill: Any, device: torch.device) -> None:
    """Allocate a model on the meta device, sharded or not, and call `fill()`, which sets its weights.

    Linear layers, embeddings, and norms that `fill` leaves out have torch's default weights, as if they had not been on
    the meta device.
    """
    tied = _tied_parameters(model)
    model.to_empty(device=device)
    for (module, name), *others in tied:
        for other, other_name in others:
            setattr(other, other_name, getattr(module, name))
    with torch.no_grad(), CpuInitialization():
        for module in model.modules():
            if isinstance(module, TORCH_LAYERS):  # also where FSDP has changed the class
                module.reset_parameters()
        fill()
