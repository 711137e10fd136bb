"""PreparedModule: what layers of a checkpoint have in common as modules of torch.

Such a module has the checkpoint's tensors under the checkpoint's names and in its dtypes, so a state dict of
the checkpoint loads into it. `prepare` turns them into what the kernels want: where a prepared tensor has the
place of a stored one (codes, the block scales of NVFP4), that one is freed; all others stay beside it.
`state_dict` gives the checkpoint's tensors back, prepared or not.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self

import torch

from moqext import ParamSpec
from moqext_torch.exchange import NAMED, as_bytes
from moqext_torch.sharing import HOLDERS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class PreparedModule(torch.nn.Module):
    """A module over a method of moqext, `LinearMethod` or `MoEMethod`; see the classes built on it.

    Attributes:
        CODES: names of the codes of weights, in the checkpoint and prepared.
        ROLES: every name that a prepared tensor may have, the codes first.
        PARAMETERS: which of the checkpoint's tensors are parameters; all others are buffers.
        EXTRAS: tensors of the module that the method does not prepare.
        dtype: of activations.
        is_prepared: whether `prepare` was done.
    """

    CODES: ClassVar[tuple[str, ...]]
    ROLES: ClassVar[tuple[str, ...]]
    PARAMETERS: ClassVar[tuple[str, ...]]
    EXTRAS: ClassVar[tuple[str, ...]] = ()

    dtype: torch.dtype
    is_prepared: bool

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.is_prepared = False
        self._method: Any = None
        self._prepared: dict[str, torch.Tensor] = {}
        self._call: Any = None  # what a call of the class needs, once it is prepared
        for role in self._beside:
            self._put(f"prepared_{role}", None)

    # ------------------------------------------------------------------------- what a class has of its own

    @property
    def method(self) -> Any:
        """The method of moqext: layers of one description share it, and what is tuned."""
        if self._method is None:
            self._method = self._find_method()
        return self._method

    def _find_method(self) -> Any:
        """The method of this module's description, where its tensors are."""
        raise NotImplementedError

    def _method_for(self, given: Mapping[str, torch.Tensor]) -> Any:
        """The method that prepares these tensors of a checkpoint."""
        return self._find_method()

    def _checked(self, role: str, tensor: torch.Tensor) -> torch.Tensor:
        """One tensor of a checkpoint in the dtype of this module.

        Raises:
            ValueError: it has another shape.
            TypeError: another dtype.
        """
        raise NotImplementedError

    def _refuse_move(self, like: torch.Tensor) -> None:
        """Raises where the module does not run on the device and in the dtype of a tensor."""

    def _restore(self, stored: dict[str, torch.Tensor]) -> None:
        """Makes the checkpoint's tensors of prepared ones that took their places, where they differ.

        Raises:
            RuntimeError: they cannot be made again.
        """
        raise NotImplementedError

    # --------------------------------------------------------------------------------------- preparation

    def prepare(self) -> Self:
        """Turns the checkpoint's tensors into prepared ones, and frees those whose place these take.

        Does nothing where that has been done.

        Raises:
            ValueError: a tensor holds scales or codes that no intact checkpoint holds.
            RuntimeError: the layer is on the meta device.
        """
        if not self.is_prepared:
            if self._codes.is_meta:
                raise RuntimeError(f"{self._kind}: load the checkpoint's tensors first; the layer is on meta")
            self._prepare(self._check(self.stored_tensors()))
        return self

    @torch.inference_mode(False)
    @torch.no_grad()
    def _prepare(self, given: Mapping[str, torch.Tensor]) -> None:
        """Takes checked tensors of a checkpoint and prepares them; in place where the layer is prepared.

        Memory that another module has, too, is left to that one.
        Nothing of the layer changes before all of them are prepared.
        """
        method = self._method_for(given)
        roles = {
            role
            for role, spec in method.prepared_params.items()
            if spec.required or given.get(role) is not None
        }
        in_place = roles == self._prepared.keys() and method is self.method
        in_place = in_place and not any(HOLDERS.is_shared(self, held) for held in self._prepared.values())
        out = self._prepared if in_place else self._room(method, roles, given)
        prepared = method.prepare(self._arguments(given), out)
        self._method = method
        self._settle(given, prepared)

    def _arguments(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The arguments of the method's `prepare`, which reads float scales from the host."""
        return {
            role: tensor.cpu() if tensor.dtype == torch.float32 else tensor.contiguous()
            for role, tensor in given.items()
            if role not in self.EXTRAS
        }

    def _room(
        self, method: Any, roles: Iterable[str], given: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Tensors for `prepare` to write: the checkpoint's where the prepared ones have their bytes."""
        room = {}
        for role in roles:
            spec = method.prepared_params[role]
            if role in given and method.keeps(role):
                room[role] = given[role].contiguous()
                if self.is_prepared and HOLDERS.is_shared(self, room[role]):
                    room[role] = room[role].clone()
            else:
                device = given[self.CODES[0]].device
                room[role] = torch.empty(spec.shape, dtype=NAMED[spec.dtype], device=device)
        return room

    def _settle(self, given: Mapping[str, torch.Tensor], prepared: Mapping[str, torch.Tensor]) -> None:
        """Keeps the tensors: prepared ones in the place of the checkpoint's, or under a name of their own."""
        for role in self._stored_roles:
            self._put(role, prepared.get(role) if self._is_freed(role) else given.get(role))
        for role in self.ROLES:
            if role not in self.CODES:
                self._put(f"prepared_{role}", None if self._is_freed(role) else prepared.get(role))
        self.is_prepared = True
        self._gather()

    def _gather(self) -> None:
        """Finds the prepared tensors by role, wherever they stand, for calls that torch does not see."""
        HOLDERS.note(self)
        found = ((role, self._prepared_tensor(role)) for role in self.ROLES)
        self._prepared = {role: tensor.detach() for role, tensor in found if tensor is not None}

    def _prepared_tensor(self, role: str) -> torch.Tensor | None:
        """One prepared tensor, None where the layer has none of that name.

        Those in the place of the checkpoint's have one byte, as codes and block scales; torch.compile can
        follow that, but not what a method says of its tensors.
        """
        stored: torch.Tensor | None = self._held(role)
        beside: torch.Tensor | None = None if role in self.CODES else getattr(self, f"prepared_{role}")
        if beside is None and stored is not None and stored.element_size() == 1:
            return stored
        return beside

    def _is_freed(self, role: str) -> bool:
        """Whether the prepared tensor takes the place of the checkpoint's."""
        return role in self._specs and self._specs[role].dtype != "float32"

    def _put(self, name: str, tensor: torch.Tensor | None) -> None:
        """Makes a tensor this module's.

        One of that shape and dtype is overwritten in place, for graphs and references that hold it, unless
        another module has it, too. None is no buffer, which torch.export would miscount.
        """
        held = self._held(name)
        if tensor is not None and held is not None and _alike(held, tensor):
            is_there = held.data_ptr() == tensor.data_ptr()
            if is_there or not HOLDERS.is_shared(self, held):
                held.requires_grad_(False)
                if not is_there:
                    held.copy_(tensor)
                return
        if name in self._parameters or name in self._buffers or name in self.__dict__:
            delattr(self, name)
        if tensor is None:
            setattr(self, name, None)
        elif name in self.PARAMETERS:
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        else:
            self.register_buffer(name, tensor, persistent=not name.startswith("prepared_"))

    # ------------------------------------------------------------------------ the checkpoint's tensors

    def stored_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the checkpoint that the layer has, by name; made again where they were freed.

        Equal bit for bit to what was loaded but for what means zero: preparing makes codes under a scale of
        zero zeros, and packing for CUDA takes the sign from a block scale of minus zero. Scales that were
        float16 or bfloat16 are float32.

        Raises:
            RuntimeError: NVFP4 prepared with compute="fp8" on the CPU, or MXFP8 with "fp8", and with "auto"
                on CUDA: the codes are folded for good.
        """
        stored = self._stored_as_they_are()
        if self.is_prepared:
            self._restore(stored)
        return stored

    @property
    def _kind(self) -> str:
        return type(self).__name__

    @property
    def _codes(self) -> torch.Tensor:
        """Some tensor that the layer always has: it tells the device."""
        codes: torch.Tensor = self._held(self.CODES[0])
        return codes

    def _held(self, name: str) -> Any:
        """A tensor of this module, None where it has none of that name."""
        return getattr(self, name, None)

    @property
    def _beside(self) -> list[str]:
        """The roles whose prepared tensors may stand under names of their own."""
        return [*(role for role in self.ROLES if role not in self.CODES), *self.EXTRAS]

    @property
    def _specs(self) -> dict[str, ParamSpec]:
        specs: dict[str, ParamSpec] = self.method.checkpoint_params
        return specs

    @property
    def _stored_roles(self) -> list[str]:
        return [*self._specs, *self.EXTRAS]

    def _stored_as_they_are(self) -> dict[str, torch.Tensor]:
        """The tensors under the names of the checkpoint, prepared or not."""
        found = {role: self._held(role) for role in self._stored_roles}
        return {role: tensor.detach() for role, tensor in found.items() if tensor is not None}

    def _take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Makes these, checked before, the checkpoint's tensors, not prepared."""
        roles = self._stored_roles
        self.is_prepared, self._prepared, self._call, self._method = False, {}, None, None
        for role in self._beside:
            self._put(f"prepared_{role}", None)
        for role in roles:
            self._put(role, tensors.get(role))
        HOLDERS.note(self)

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors in the dtypes of this module.

        Raises:
            ValueError: one is missing, unknown or of another shape.
            TypeError: one is of another dtype.
        """
        required = [role for role, spec in self._specs.items() if spec.required]
        required += [role for role in self.EXTRAS if self._held(role) is not None]
        for role in required:
            if role not in tensors:
                raise ValueError(f"{role}: missing")
        return {role: self._checked(role, aligned(tensor.detach())) for role, tensor in tensors.items()}

    def _checked_codes(self, role: str, tensor: torch.Tensor) -> torch.Tensor:
        """Codes, or block scales of one byte: the shape has to be right, and bytes may be typed uint8."""
        spec = self._specs[role]
        if tuple(tensor.shape) != spec.shape:
            raise ValueError(f"{role}: expected shape {list(spec.shape)}, got {list(tensor.shape)}")
        tensor = as_bytes(tensor) if spec.dtype == "float8_e8m0fnu" else tensor
        self._refuse_dtype(role, tensor)
        return tensor.view(NAMED[spec.dtype])

    def _refuse_dtype(self, role: str, tensor: torch.Tensor) -> None:
        """Raises TypeError where a tensor of a checkpoint has another dtype than its role."""
        spec = self._specs.get(role)
        if spec is None or spec.dtype == "float32":
            if tensor.dtype not in DTYPES:
                raise TypeError(f"{role}: expected float32, bfloat16 or float16, got {tensor.dtype}")
        elif tensor.dtype not in (NAMED[spec.dtype], torch.uint8):
            raise TypeError(f"{role}: expected {NAMED[spec.dtype]} or its bytes as uint8, got {tensor.dtype}")

    # ------------------------------------------------------------------------------ what torch does with it

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.is_prepared:
            destination.update({prefix + role: tensor for role, tensor in self.stored_tensors().items()})
        else:
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Takes the checkpoint's tensors; a prepared layer is prepared anew, in place."""
        roles = self._stored_roles
        own = {key.removeprefix(prefix): key for key in state_dict if key.startswith(prefix)}
        given = {role: state_dict[own[role]] for role in roles if role in own}
        held = [role for role in roles if self._held(role) is not None or self._is_folded(role)]
        if strict:
            unexpected_keys += [key for role, key in own.items() if role not in roles]
            missing_keys += [prefix + role for role in held if role not in given]
        if not given:
            return
        device = next(iter(given.values())).device if self._codes.is_meta else self._codes.device
        copy = not local_metadata.get("assign_to_params_buffers", False)
        try:
            rest = {} if given.keys() >= set(held) else self.stored_tensors()
            tensors = self._check(
                rest | {role: tensor.to(device, copy=copy) for role, tensor in given.items()}
            )
            if self.is_prepared:
                self._prepare(tensors)
            else:
                self._take(tensors)
        except (ValueError, TypeError, RuntimeError, BufferError) as error:
            error_msgs.append(f"{prefix.rstrip('.') or self._kind}: {error}")

    def _is_folded(self, role: str) -> bool:
        """Whether a tensor of the checkpoint is part of another one, prepared."""
        return self.is_prepared and role in self._specs and self._specs[role].required

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """`.to`, `.cuda`, `.half` and their like: tensors move, and keep the dtypes of the checkpoint.

        What a dtype changes is that of activations. A prepared layer is prepared again.

        Raises:
            ValueError: activations cannot have that dtype.
            UnsupportedQuantization: the module does not run there; it stays where it is.
            RuntimeError: as `stored_tensors`.
        """
        like = fn(torch.empty(0, dtype=self.dtype, device=self._codes.device))
        if like.dtype not in DTYPES:
            raise ValueError(f"{self._kind}: runs in bfloat16, float16 or float32, not in {like.dtype}")
        if self.is_prepared and like.device == self._codes.device and like.dtype == self.dtype:
            for tensor in (*self._stored_as_they_are().values(), *self._prepared.values()):
                fn(as_carrier(tensor))  # in place, as share_memory() is
            HOLDERS.note(self)
            return self
        self._refuse_move(like)
        tensors = {role: fn(as_carrier(t)).view(t.dtype) for role, t in self.stored_tensors().items()}
        again = self.is_prepared and like.device.type != "meta"
        self.dtype = like.dtype
        self._take(tensors)
        return self.prepare() if again else self

    def __getstate__(self) -> dict[str, Any]:
        """Methods are shared by description, not copied; float8 travels as bytes, which pickle can carry."""
        state = {**self.__dict__, "_method": None, "_call": None, "_prepared": {}}
        for store in ("_parameters", "_buffers"):
            state[store] = {name: _as_bytes(tensor) for name, tensor in state[store].items()}
        state["float8_tensors"] = [
            name for name, tensor in (self._parameters | self._buffers).items() if _is_float8(tensor)
        ]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = state.pop("float8_tensors")
        super().__setstate__(state)
        for name in names:
            store = self._parameters if name in self._parameters else self._buffers
            tensor = store[name].detach().view(torch.float8_e4m3fn)
            store[name] = (
                torch.nn.Parameter(tensor, requires_grad=False) if store is self._parameters else tensor
            )
        HOLDERS.note(self)
        if self.is_prepared:
            self._gather()


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; a copy where its elements lie across their own size, as in files with odd offsets."""
    if tensor.is_meta or tensor.data_ptr() % tensor.element_size() == 0:
        return tensor
    return tensor.clone()


def as_carrier(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as integers, which no conversion of floats touches."""
    return tensor.view(_CARRIERS[tensor.element_size()])


def _is_float8(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.dtype == torch.float8_e4m3fn


def _as_bytes(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor for a pickle: the bytes of a float8 one, others as they are."""
    return tensor.detach().view(torch.uint8) if _is_float8(tensor) else tensor


def _alike(held: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a tensor can be overwritten by another."""
    return (held.shape, held.dtype, held.device) == (tensor.shape, tensor.dtype, tensor.device) and not (
        held.is_meta or held.is_inference()
    )
