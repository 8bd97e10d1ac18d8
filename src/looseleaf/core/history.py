"""Finished requests: what they had committed and how they had hit, for `explain` and `pin(request_id=...)`."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from looseleaf.core.explain import Finding
from looseleaf.core.namespaces import Tenancy
from looseleaf.core.tokens import TOKEN_BYTES
from looseleaf.errors import UnknownRequest
from looseleaf.ids import RequestId

MIN_REMEMBERED_TOKENS = 32 * 2**20


@dataclass(slots=True)  # not frozen: one is made at each release
class FinishedRequest:
    """A released lease. `data`: its committed whole blocks, packed; None once their room was needed for younger
    requests."""

    tenancy: Tenancy
    num_committed_tokens: int
    num_prompt_tokens: int
    data: bytes | None
    finding: Finding


class History:
    """The last `num_requests` finished requests. Their tokens are kept as long as all together stay below
    `max_tokens` (4 bytes each), oldest dropped first; explanations stay, at 570 to 640 bytes a request with its id
    (`tests/core/test_explain.py` measures it)."""

    def __init__(self, num_requests: int, max_tokens: int) -> None:
        self._num_requests = num_requests
        self._max_bytes = max(max_tokens, MIN_REMEMBERED_TOKENS) * TOKEN_BYTES
        self._requests: OrderedDict[RequestId, FinishedRequest] = OrderedDict()
        self._with_data: OrderedDict[RequestId, int] = OrderedDict()
        self._num_bytes = 0

    def add(self, request_id: RequestId, request: FinishedRequest) -> None:
        """Remember a request; an earlier one of the same id is replaced."""
        if request_id in self._requests:
            self._drop(request_id)
        self._requests[request_id] = request
        if request.data is not None:
            self._with_data[request_id] = len(request.data)
            self._num_bytes += len(request.data)
        while len(self._requests) > self._num_requests:
            self._drop(next(iter(self._requests)))
        while self._num_bytes > self._max_bytes:
            oldest, num_bytes = self._with_data.popitem(last=False)
            self._num_bytes -= num_bytes
            self._requests[oldest].data = None

    def get(self, request_id: RequestId) -> FinishedRequest | None:
        """The finished request of that id, None if it is not remembered."""
        return self._requests.get(request_id)

    def require(self, request_id: RequestId) -> FinishedRequest:
        """The finished request of that id.

        Raises:
            UnknownRequest: it is not remembered.
        """
        finished = self._requests.get(request_id)
        if finished is None:
            raise UnknownRequest(request_id, f"the last {self._num_requests:,} finished requests are known")
        return finished

    def _drop(self, request_id: RequestId) -> None:
        if self._requests.pop(request_id, None) is not None:
            self._num_bytes -= self._with_data.pop(request_id, 0)
