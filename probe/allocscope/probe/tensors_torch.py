"""The job's tensors, modules and optimizers, read without running any code of the job's.

Everything is read by the C descriptors of torch's own base classes, with `__torch_function__` switched off in this thread, so
that no property, hook or override of a subclass is called. A subclass with a `__torch_dispatch__` of its own (DTensor,
FakeTensor, ...) has no storage; what it wraps is found in its attributes. Nothing here calls CUDA.

What stays behind: a storage or a saved tensor that Python had not seen before has a small Python object (about 100 bytes of
host memory) from then on, which goes when it goes; so has PyTorch made it, whoever looks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, NamedTuple

from allocscope.model.tensors import View
from allocscope.probe.torch_cuda import attribute

LONGEST_NAME = 200
mro_of: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
"""The classes that a type inherits from, whatever its metaclass says; so are the next two."""
own_of: Callable[[type], Mapping[str, Any]] = type.__dict__["__dict__"].__get__
"""What a class itself defines."""
_name_of: Callable[[type], str] = type.__dict__["__name__"].__get__


class Role(Enum):
    """What an object is to a report."""

    TENSOR = "tensor"
    PARAMETER = "parameter"
    WRAPPER = "wrapper"
    """A tensor that only holds others."""
    MODULE = "module"
    OPTIMIZER = "optimizer"


class Facts(NamedTuple):
    """One tensor's Storage, and how the tensor looks at it."""

    device_index: int
    address: int
    bytes: int
    view: View


def type_name(item: object) -> str:
    """The name of its real type."""
    return name_of(type(item))


def name_of(kind: type) -> str:
    """A class's name."""
    return _name_of(kind)[:LONGEST_NAME]


def attributes_of(item: object) -> dict[str, Any] | None:
    """Its own attributes, as the dict that they lie in; None where it has none, or one that a class makes up."""
    found: Any = next((own_of(k)["__dict__"] for k in mro_of(type(item)) if "__dict__" in own_of(k)), None)
    if type(found) is GetSetDescriptorType or type(found) is MemberDescriptorType:
        found = found.__get__(item)
    return found if type(found) is dict else None


class TorchObjects:
    """The torch of this process, as far as a report reads it."""

    def __init__(self, modules: Mapping[str, Any], device_type: str) -> None:
        """Raises KeyError or AttributeError where it is not (wholly) imported, or too old (before 2.0)."""
        torch = modules["torch"]
        self._tensor = _of(torch, "Tensor")
        base = {name: value for kind in reversed(mro_of(self._tensor)[1:]) for name, value in kind.__dict__.items()}
        storage = _of(modules["torch._C"], "StorageBase").__dict__
        self._parameter = _of(modules["torch.nn.parameter"], "Parameter")
        self._dispatch = self._tensor.__dict__["__torch_dispatch__"]
        self._no_function = self._parameter.__dict__["__torch_function__"]
        self._roles = (
            (_of(modules["torch.nn.modules.module"], "Module"), Role.MODULE),
            (attribute(modules.get("torch.optim.optimizer"), "Optimizer"), Role.OPTIMIZER),
        )
        self._device_type = device_type
        self._device, self._shape, self._dtype = (base[n].__get__ for n in ("device", "shape", "dtype"))
        self._storage, self._size, self._address = base["untyped_storage"], storage["nbytes"], storage["data_ptr"]
        self._offset, self._item_size, self._count = base["storage_offset"], base["element_size"], base["numel"]
        binding = modules["torch._C"]
        self._is_lazy_copy = attribute(binding, "_is_cow_tensor")
        self._data_address = attribute(binding, "_data_address")
        self._quiet = attribute(binding, "DisableTorchFunction") or attribute(binding, "DisableTorchFunctionSubclass")
        saved = attribute(attribute(binding, "_autograd"), "SavedTensor")
        self.tells_hooks = saved is not None and {"unpack_hook", "data"} <= own_of(saved).keys()
        """Whether a saved tensor tells of hooks without running them."""
        self.requires_grad: Callable[[Any], bool] = base["requires_grad"].__get__
        self.retains_grad: Callable[[Any], bool] = base["retains_grad"].__get__
        self.is_view: Callable[[Any], bool] = base["_is_view"]
        self.base: Callable[[Any], Any] = base["_base"].__get__
        # Never of a view: an operation that changes one in place holds a lock while it waits for the GIL, and these want that lock.
        self.is_leaf: Callable[[Any], bool] = base["is_leaf"].__get__
        self.grad_fn: Callable[[Any], Any] = base["grad_fn"].__get__
        """Only by a gate."""
        self.gradient: Callable[[Any], Any] = base["grad"].__get__
        """Of a leaf, or where it is retained: elsewhere torch warns. Only by a gate."""
        self._views: dict[tuple[tuple[int, ...], Any], View] = {}
        self.without_storage = 0
        """Tensors on such a device that were met and have none of their own (sparse ones, functorch's)."""

    def quiet(self) -> contextlib.AbstractContextManager[Any]:
        """Switches `__torch_function__` off in this thread, for modes and subclasses alike."""
        return _entered(self._quiet()) if self._quiet is not None else contextlib.nullcontext()

    def role_of(self, kind: type) -> Role | None:
        """What the instances of that type are."""
        bases = mro_of(kind)
        if any(base is self._tensor for base in bases):
            return self._tensor_role(bases)
        return next((role for base in bases for known, role in self._roles if base is known), None)

    def _tensor_role(self, bases: tuple[type, ...]) -> Role:
        dispatch = next(own_of(k)["__torch_dispatch__"] for k in bases if "__torch_dispatch__" in own_of(k))
        if dispatch is not self._dispatch:
            return Role.WRAPPER
        return Role.PARAMETER if any(k is self._parameter for k in bases) else Role.TENSOR

    def is_plain(self, kind: type) -> bool:
        """Whether what is done with its attributes is done in C at once, with none of Python's functions in between."""
        function = next(own_of(k)["__torch_function__"] for k in mro_of(kind) if "__torch_function__" in own_of(k))
        return kind is self._tensor or function is self._no_function

    def is_tensor(self, item: object) -> bool:
        return any(kind is self._tensor for kind in mro_of(type(item)))

    def wrapped_in(self, wrapper: Any) -> list[Any]:
        """The tensors that a wrapper has as attributes."""
        return [held for held in list((attributes_of(wrapper) or {}).values()) if self.is_tensor(held)]

    def facts(self, tensor: Any) -> Facts | None:
        """None: on no device of the type asked for, or without a storage of its own (sparse, functorch's, freed)."""
        device = self._device(tensor)
        if device.type != self._device_type:
            return None
        try:
            storage = self._storage(tensor)
            size = self._size(storage)
            address = self._address_of(tensor, storage) if size else 0
        except (RuntimeError, NotImplementedError):
            self.without_storage += 1
            return None
        if not size or not address:
            return None
        return Facts(device.index or 0, address, size, self._view(tensor))

    def _address_of(self, tensor: Any, storage: Any) -> int:
        if self._is_lazy_copy is not None and self._is_lazy_copy(tensor):  # to ask its storage would make the copy
            return int(self._data_address(tensor) - self._offset(tensor) * self._item_size(tensor))
        return int(self._address(storage))

    def _view(self, tensor: Any) -> View:
        """One value for all that look alike."""
        try:
            shape = self._shape(tensor)
        except RuntimeError:  # a nested tensor, which has none: all of its elements as one dimension
            shape = (self._count(tensor),)
        key = shape, self._dtype(tensor)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = View(tuple(key[0]), str(key[1]).removeprefix("torch."))
        return view


def _of(module: Any, name: str) -> Any:
    found = attribute(module, name)
    if found is None:
        raise AttributeError(name)
    return found


@contextlib.contextmanager
def _entered(guard: Any) -> Iterator[None]:
    with guard:
        yield
