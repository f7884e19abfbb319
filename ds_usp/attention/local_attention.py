"""Detection of what a framework's local attention computes, from the module's class and attributes.

Above ring degree 1 the package's kernels replace the local attention, so its mask, scale and
dropout must be known, and the extra arguments of its calls must not change them. ``USPAttention``
asks for them when it is constructed, and checks arguments at each call, on every rank within
``check_on_all_ranks``. Nothing here communicates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from ds_usp.attention.validation import no_mask_error
from ds_usp.comm.call_record import Signature
from ds_usp.comm.readings import Readings
from ds_usp.errors import ConfigError, UnsupportedAttentionError
from ds_usp.geometry.masks import MaskSpec, has_only

_MASKS = ("attention_mask", "attn_mask", "mask")
_CAUSAL = ("causal", "is_causal")
_SCALES = ("softmax_scale", "scale")
_ADDITIVE_MINUS_INFINITY = -1e4  # what Megatron fills hidden pairs with
_COMPARE_BLOCK = 1 << 22  # elements of a mask

# What detectors read of a local attention, and of modules in it; read_attributes follows it.
_READ: tuple[str, ...] = (*_CAUSAL, "softmax_scale", "norm_factor", "dropout_p", "window_size")
_READ += ("attn_mask_type", "layer_number", "apply_query_key_layer_scaling", "alibi_slopes")
_READ_INSIDE: tuple[tuple[str, str], ...] = (("drop", "p"), ("attention_dropout", "p"))
_READ_INSIDE += (("scale_mask_softmax", "scale"), ("scale_mask_softmax", "window_size"))

NO_ARGUMENTS = Signature(("0 extra arguments", "no keywords"))


@dataclass(frozen=True)
class LocalAttention:
    """Describes what a local attention computes and returns.

    Args:
        mask: who sees whom.
        softmax_scale: factor of the scores; None is ``head_dim ** -0.5``.
        dropout_p: in training; a ring refuses any above 0 there.
        flat_output: it returns ``h * d`` as one dim.
        true_means_masked: a bool mask passed to it is True for masked pairs (Megatron), not for
            pairs that attend (torch).
        sinks_owner: the module whose ``softmax_offset`` are sinks of the softmax, if any.
    """

    mask: MaskSpec
    softmax_scale: float | None
    dropout_p: float
    flat_output: bool = False
    true_means_masked: bool = False
    sinks_owner: Any = None

    def sinks(self, device: torch.device) -> torch.Tensor | None:
        """The sinks ``[h]`` on a device; read at each call, as weights may move."""
        sinks = getattr(self.sinks_owner, "softmax_offset", None)
        return None if sinks is None else sinks.to(device)


# A class is known by its package's and its own name, so no framework is imported to be recognized.
# A subclass that overrides forward is not detected: the user must say what it computes.


def detect_local_attention(module: Any) -> LocalAttention | None:
    """Read from a module what it computes; None unless its class and forward are known.

    Raises:
        UnsupportedAttentionError: a known class that computes what the ring does not.
    """
    for cls in type(module).__mro__:
        detector = _DETECTORS.get((cls.__module__.split(".")[0], cls.__name__))
        known_forward = getattr(cls, "forward", None)  # a subclass may have another one
        if detector is not None and type(module).forward is known_forward:
            megatron = cls.__module__.split(".")[0] == "megatron"
            return replace(detector(module), true_means_masked=megatron)
    return None


def read_attributes(module: Any) -> list[object]:
    """The values that decide what a local attention computes, for callers to compare: of ``_READ``,
    None where it has none, and of ``_READ_INSIDE``. Cheap enough for each call."""
    attributes: Mapping[str, Any] = getattr(module, "__dict__", {})
    values = [attributes.get(name) for name in _READ]
    modules = attributes.get("_modules", {})
    return values + [getattr(modules[x], name, None) for x, name in _READ_INSIDE if x in modules]


def resolve_ring_attention(
    module: Any,
    detected: LocalAttention | None,
    mask: MaskSpec | None,
    softmax_scale: float | None,
    dropout_p: float | None,
) -> LocalAttention:
    """Decide what a ring computes instead of a module: what was detected, or the user's arguments
    (None: not given), which :func:`check_overrides` has passed.

    Raises:
        UnsupportedAttentionError: an unknown module without enough arguments, or with parameters;
            one with ALiBi slopes.
        ConfigError: an argument contradicts an attribute of the module.
    """
    if getattr(module, "alibi_slopes", None) is not None:
        raise UnsupportedAttentionError(
            f"{type(module).__name__} has alibi_slopes, and no kernel here adds ALiBi's bias to "
            "scores: use other positions, or ulysses_degree = sequence-parallel size (ring 1), "
            "which calls it on the heads of a rank, whose slopes it must have"
        )
    if detected is not None:
        return detected
    if mask is None or dropout_p is None:
        # A causal mask would be refused next where an attribute contradicts it.
        causal = all(getattr(module, name, True) is not False for name in _CAUSAL)
        kind = "causal" if causal else "full"
        value_of_example = {f"mask=MaskSpec.{kind}()": mask, "dropout_p=0.0": dropout_p}
        missing = [example for example, value in value_of_example.items() if value is None]
        raise UnsupportedAttentionError(
            f"with a ring the attention of {type(module).__name__} must be known, and it is no "
            "class whose attributes can be read. Give what it computes too, for example "
            f"{' and '.join(missing)} (softmax_scale is head_dim ** -0.5 unless given), or use "
            "ulysses_degree = sequence-parallel size (ring 1), which runs it as it is"
        )
    if isinstance(module, torch.nn.Module):
        _check_unknown_module(module, mask, dropout_p)
    module_scale = getattr(module, "softmax_scale", None)
    if softmax_scale is None and isinstance(module_scale, float):
        softmax_scale = module_scale
    elif isinstance(module_scale, float) and module_scale != softmax_scale:
        raise ConfigError(
            f"softmax_scale={softmax_scale} was given, but the local attention has softmax_scale="
            f"{module_scale}. Leave softmax_scale out, or change the local attention"
        )
    return LocalAttention(mask, softmax_scale, dropout_p)


def _is_causal(mask: MaskSpec) -> bool:
    """Whether no query sees a later key: what flags of the names ``_CAUSAL`` say."""
    return mask.right == 0 and has_only(mask, "left", "right", "documents")


def _check_unknown_module(module: torch.nn.Module, mask: MaskSpec, dropout_p: float) -> None:
    """Check arguments for an unknown module against its attributes: ConfigError for another dropout
    or causality, UnsupportedAttentionError for parameters, which would have no effect."""
    name = type(module).__name__
    trainable = [parameter for parameter, _ in module.named_parameters()]
    if trainable:
        raise UnsupportedAttentionError(
            f"{name} has parameters ({', '.join(trainable[:4])}), and a ring computes attention "
            "without calling it: they would have no effect and no gradient. Apply them outside of "
            "the local attention, or use ulysses_degree = sequence-parallel size (ring 1)"
        )
    drops = {x.p for x in module.modules() if isinstance(x, torch.nn.Dropout)} - {0.0}
    if drops - {dropout_p}:
        raise ConfigError(
            f"dropout_p={dropout_p} was given, but {name} has a Dropout of {max(drops)}. Give "
            f"dropout_p={max(drops)}, or change the local attention"
        )
    for attribute in _CAUSAL:
        causal = getattr(module, attribute, None)
        if isinstance(causal, bool) and causal != _is_causal(mask):
            raise ConfigError(
                f"mask={mask} was given, but {name} has {attribute}={causal}. Give the mask that "
                "it computes, or change the local attention"
            )


def check_overrides(
    detected: LocalAttention | None,
    mask: MaskSpec | None,
    softmax_scale: float | None,
    dropout_p: float | None,
) -> None:
    """ConfigError if a user's arguments (None: not given) are not what a local attention computes,
    where it was detected, or not valid at all, as a mask with documents, which belong to a batch.
    """
    if mask is not None and not isinstance(mask, MaskSpec):
        raise no_mask_error(mask)
    if dropout_p is not None and not 0 <= dropout_p < 1:
        raise ConfigError(f"dropout_p={dropout_p} must be 0 or more and less than 1")
    if mask is not None and mask.documents:
        fix = "give documents=borders to each call"
        if mask.parents or mask.areas:
            fix = "call ds_usp.usp_attention with it"
        raise ConfigError(
            f"mask={mask} was given to the module, and documents belong to a batch: {fix}"
        )
    overrides = {"mask": mask, "softmax_scale": softmax_scale, "dropout_p": dropout_p}
    for name, value in overrides.items():
        computed = value if detected is None else getattr(detected, name)
        if value is not None and value != computed:
            computed = "head_dim ** -0.5" if computed is None else computed
            raise ConfigError(
                f"{name}={value} was given, but the local attention computes with {computed}. "
                f"Leave {name} out, or change the local attention"
            )


def _flash_self_attention(module: Any) -> LocalAttention:
    """``FlashSelfAttention`` of Megatron-DeepSpeed and of flash-attn: a window of -1 is an open
    side, and ``causal`` bounds the right side at 0."""
    left, right = (None if x < 0 else x for x in getattr(module, "window_size", (-1, -1)))
    mask = MaskSpec(left, 0 if module.causal else right)
    dropout = getattr(module, "drop", None)
    dropout_p = module.dropout_p if dropout is None else dropout.p
    return LocalAttention(mask, module.softmax_scale, float(dropout_p))


def _flash_self_attention_triton(module: Any) -> LocalAttention:
    """Megatron-DeepSpeed's class by Triton, which gives its kernel no scale and no dropout."""
    mask = MaskSpec.causal() if module.causal else MaskSpec.full()
    return LocalAttention(mask, None, 0.0, flat_output=True)


def _core_attention(module: Any) -> LocalAttention:
    """Megatron-DeepSpeed's ``CoreAttention``. With ``apply_query_key_layer_scaling`` its
    ``norm_factor`` is ``sqrt(head_dim)`` times the layer number, by which its softmax multiplies
    the scores again: the scale has no layer number."""
    factor = float(module.norm_factor)
    if module.apply_query_key_layer_scaling:
        factor /= module.layer_number
    mask = _megatron_mask(module.attn_mask_type)
    dropout_p = float(module.attention_dropout.p)
    return LocalAttention(mask, 1.0 / factor, dropout_p, flat_output=True)


def _dot_product_attention(module: Any) -> LocalAttention:
    """megatron-core's class, in plain torch; ``window_size`` (left, right) replaces its mask."""
    softmax = module.scale_mask_softmax
    mask = _megatron_mask(module.attn_mask_type)
    if softmax.window_size is not None:
        if min(softmax.window_size) < 0:
            raise UnsupportedAttentionError(
                f"window_size={tuple(softmax.window_size)}: megatron-core's DotProductAttention "
                "takes -1 as a distance and hides keys that an open side shows. Give the sequence "
                "length in its place, or window_size=None"
            )
        mask = MaskSpec(*softmax.window_size)
    scale = float(module.softmax_scale) * (softmax.scale or 1.0)
    dropout_p = float(module.attention_dropout.p)
    return LocalAttention(mask, scale, dropout_p, flat_output=True, sinks_owner=module)


def _megatron_mask(kind: Any) -> MaskSpec:
    name = getattr(kind, "name", str(kind))
    if name not in ("causal", "no_mask"):
        raise UnsupportedAttentionError(
            f"an attention of mask type {name!r} takes its mask from a tensor, which a ring does "
            "not carry. Use mask type causal or no_mask."
        )
    return MaskSpec.causal() if name == "causal" else MaskSpec.full()


# (top-level package, class name) -> what a module of that class computes.
_DETECTORS: Mapping[tuple[str, str], Callable[[Any], LocalAttention]] = MappingProxyType(
    {
        ("megatron", "FlashSelfAttention"): _flash_self_attention,
        ("megatron", "FlashSelfAttentionTriton"): _flash_self_attention_triton,
        ("flash_attn", "FlashSelfAttention"): _flash_self_attention,
        ("megatron", "CoreAttention"): _core_attention,
        ("megatron", "DotProductAttention"): _dot_product_attention,
    }
)


# Note [extra arguments with a ring]
#
# Frameworks hand a dense mask of all tokens to every layer, nearly always the causal one that the
# ring computes anyway. So it is compared, value by value, once a forward pass, by the first layer,
# in blocks of rows: equal is accepted, anything else is refused, since ignoring it would be
# silently wrong. None passes, as in torch.


class FrameworkArgumentChecks:
    """Refuses every argument that would change the result; accepts those that agree with the ring.

    Args:
        attention: what the ring computes.
        readings: the mesh's, which keep a dense mask's comparison for the layers of a pass.
        attributes: :func:`read_attributes` when ``attention`` was read: others make it stale.
    """

    def __init__(
        self, attention: LocalAttention, readings: Readings, attributes: Sequence[object] = ()
    ) -> None:
        self.attention, self._readings, self.attributes = attention, readings, attributes

    def check(
        self, seq_len: int, head_dim: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Signature:
        """Check one call's extra arguments, UnsupportedAttentionError for one that the ring cannot
        honour; returns their part of the call signature. One given by position is taken for a mask.
        ``seq_len``: of the whole sequence."""
        scale = self.attention.softmax_scale or head_dim**-0.5
        for index, value in enumerate(args):
            self._check_argument(f"extra argument {index}", "attention_mask", value, seq_len, scale)
        for name, value in kwargs.items():
            self._check_argument(name, name, value, seq_len, scale)
        if not args and not kwargs:
            return NO_ARGUMENTS
        return Signature((f"{len(args)} extra arguments", *(sorted(kwargs) or ["no keywords"])))

    def _check_argument(
        self, label: str, name: str, value: Any, seq_len: int, scale: float
    ) -> None:
        """Check one extra argument of a call, ``label`` in messages, by the parameter's ``name``: a
        mask, a causal flag, a scale or ``dropout_p``. None as a value always passes."""
        attention = self.attention
        if value is None:
            return
        if name in _MASKS and isinstance(value, torch.Tensor):
            key = "dense mask", attention.mask, attention.true_means_masked, seq_len
            fits = self._readings.of([value], key, lambda: self._is_mask(value, seq_len))
        elif name in _CAUSAL:
            fits = isinstance(value, bool) and value == _is_causal(attention.mask)
        elif name in _SCALES:
            fits = isinstance(value, (int, float)) and math.isclose(value, scale, rel_tol=1e-9)
        elif name == "dropout_p":
            fits = isinstance(value, (int, float)) and value == attention.dropout_p
        else:
            fits = False
        if not fits:
            shown = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else value
            means = "hides a pair" if attention.true_means_masked else "lets a pair attend"
            raise UnsupportedAttentionError(
                f"{label}={shown!s} differs from the ring's {attention.mask} mask "
                f"(True {means}), scale {scale:.6g}, dropout {attention.dropout_p}. Leave it out, "
                "give what the local attention computes as mask=, softmax_scale= and dropout_p= "
                "of USPAttention, or use ring degree 1."
            )

    def _is_mask(self, mask: torch.Tensor, seq_len: int) -> bool:
        """Whether a dense mask ``[..., tokens, tokens]`` is the one the ring computes."""
        if mask.ndim < 2 or mask.shape[-2:] != (seq_len, seq_len):
            return False
        if not has_only(self.attention.mask, "left", "right", "prefix"):
            return False  # a dense mask would have to contain documents
        rows = max(1, _COMPARE_BLOCK // seq_len)  # row blocks: masks are large
        blocks_agree = [
            self._rows_agree(mask[..., start : start + rows, :], start)
            for start in range(0, seq_len, rows)
        ]
        return bool(torch.stack(blocks_agree).all())  # waits for a GPU once

    def _rows_agree(self, mask: torch.Tensor, start: int) -> torch.Tensor:
        """Whether rows of a dense mask ``[..., rows, tokens]``, bool or additive, from global
        position ``start`` on hide exactly what the ring's window and prefix hide: a bool of no
        dims, on the mask's device."""
        # An additive mask must also be 0 where it hides nothing.
        rule = self.attention.mask
        allowed = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device)
        if rule.left is not None:
            allowed.triu_(start - rule.left)
        if rule.right is not None:
            allowed.tril_(start + rule.right)
        allowed[:, : rule.prefix] = True
        if mask.dtype == torch.bool:
            return ((mask != allowed) == self.attention.true_means_masked).all()
        hidden = mask <= _ADDITIVE_MINUS_INFINITY
        return ((hidden != allowed) & (hidden | (mask == 0))).all()
