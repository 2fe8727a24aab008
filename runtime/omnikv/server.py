"""Server of the layers of a decode section.

Shapes: B batch, H query heads, Q query length, E value dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.call import MAX_QUERIES
from runtime.attention.call import Call
from runtime.attention.failures import attempt
from runtime.attention.layer import Served
from runtime.attention.mask import starts_of
from runtime.attention.servers import kernel_of, pays
from runtime.omnikv.bank import fetched
from runtime.omnikv.decode import LayerCall, OmniKV
from runtime.omnikv.select import Role

NOT_OURS = "this cache is not one of new_cache(): decode is dense, whatever the decode section says"


@dataclass(frozen=True)
class SelectedServer:
    """Server of one layer of a decode section: over the tokens that a filter layer has selected.

    Attributes:
        layer: the layer's number.
    """

    decode: OmniKV
    role: Role
    layer: int

    def __call__(self, call: Call) -> Served | None:
        """See runtime.attention.layer.Server. Later servers get plain keys and values."""
        served = attempt(call, self._attend)
        if isinstance(served, Served):
            return served
        call.why_dense = served
        call.key = fetched(call.key)
        call.value = fetched(call.value)
        return None

    def _attend(self, call: Call) -> Served | None:
        """Over selected tokens of all, or of a chunk's past; None if there are none."""
        if call.cache is None:
            return None
        decode = self.decode
        q_len = call.q_shape[2]
        k_len = call.k_shape[2]
        selections = getattr(call.cache, "selections", None)
        if selections is None or selections.keys() != decode.filter_layers:
            if k_len > q_len:
                call.layer.settings.warn_once(NOT_OURS)
            return None
        role = self.role
        selection = selections.get(self.layer if role.is_filter else role.served_by)
        scores = None
        if role.is_filter:
            selection.clear()
            own = call.cache.layers[self.layer]
            if hasattr(own, "remember"):
                own.check_holds(self.layer, call.k_shape)
                if decode.section.selector != "last":
                    scores = own
        contiguous, starts = starts_of(call.mask)
        if not contiguous or call.logits.sinks is not None or call.logits.window is not None:
            return None
        if call.unsupported_reason is not None:
            return None
        mine = LayerCall(
            self.layer,
            role,
            call.query,
            call.key,
            call.value,
            starts,
            call.logits,
            selection,
            scores,
        )
        if q_len <= MAX_QUERIES and k_len > decode.count(k_len):
            out = decode.attend(mine)
            if out is None:
                return None
            return Served(out.transpose(1, 2), "chosen")
        if q_len > 1:
            decode.remember_prefill(mine)
        context = call.context
        if context is None or context.ranges is None:
            return None
        if q_len <= MAX_QUERIES or not pays(call):
            return None
        kernel, reason = kernel_of(call)
        if reason is not None:
            return None
        firsts = [start for start, _ in context.ranges]
        out = decode.attend_chunk(mine, firsts, backend=kernel)
        if out is None:
            return None
        return Served(out.transpose(1, 2), "sparse")
