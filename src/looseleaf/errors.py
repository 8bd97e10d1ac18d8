"""One tree of errors, each with typed fields and a stable `code`.

    LooseleafError
    ├── ConfigError(ValueError)      unknown or invalid setting
    ├── RequestError(ValueError)     InvalidTokens · DuplicateRequest
    ├── CapacityError                OutOfBlocks · PinQuotaExceeded · PromptTooLong
    ├── LifecycleError(RuntimeError) LeaseClosed · CommitBeyondReserved · TruncateBelowCommitted ·
    │                                UnknownRequest · UnknownPin · UnknownSession
    ├── TierError                    TierUnavailable · PageCorrupt · LayoutMismatch
    ├── ModelError                   UnsupportedModel
    └── IntegrityError               I1…

A message is facts with units, then a hint on a line of its own. Bad input changes nothing and loses nothing.
"""

from __future__ import annotations

from typing import ClassVar


class LooseleafError(Exception):
    """Root of all errors raised on purpose. `code` is stable and goes into HTTP answers and metrics."""

    code: ClassVar[str] = "looseleaf_error"

    def __init__(self, facts: str, hint: str | None = None) -> None:
        self.facts = facts
        self.hint = hint
        super().__init__(facts if hint is None else f"{facts}\nhint: {hint}")


class ConfigError(LooseleafError, ValueError):
    """A setting that does not exist, or a value that it cannot take."""

    code = "config_error"


class RequestError(LooseleafError, ValueError):
    """A request that is wrong in itself, whatever the state of the cache."""

    code = "invalid_request"


class InvalidTokens(RequestError):
    """Tokens that are empty, negative, ≥ 2**31 or not integers."""

    code = "invalid_tokens"


class DuplicateRequest(RequestError):
    """A live lease already has this request id."""

    code = "duplicate_request"

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        super().__init__(
            f"request {request_id!r} already holds a live lease",
            "release that lease first, or give this request an id of its own",
        )


class CapacityError(LooseleafError):
    """Memory or quota does not suffice now."""

    code = "capacity"


class OutOfBlocks(CapacityError):
    """A reservation does not fit. Nothing was changed and nothing was evicted.

    `needed`: blocks still missing for this call. `free`, `evictable`, `pinned`: blocks at that moment.
    """

    code = "out_of_blocks"

    def __init__(self, needed: int, free: int, evictable: int, pinned: int) -> None:
        self.needed = needed
        self.free = free
        self.evictable = evictable
        self.pinned = pinned
        super().__init__(
            f"cannot reserve {needed} blocks: {free} free, {evictable} evictable, {pinned} pinned",
            "release pins (GET /v1/pins) or lower max_running_requests",
        )


class PinQuotaExceeded(CapacityError):
    """A hard pin does not fit under the quota, or hard pins hold more than a new quota allows. Nothing has changed."""

    code = "pin_quota_exceeded"

    def __init__(
        self,
        needed_blocks: int,
        available_blocks: int,
        quota_blocks: int,
        hard_pinned_blocks: int,
        namespace: str | None = None,
        *,
        is_new_quota: bool = False,
    ) -> None:
        self.needed_blocks = needed_blocks
        self.available_blocks = available_blocks
        self.quota_blocks = quota_blocks
        self.hard_pinned_blocks = hard_pinned_blocks
        self.namespace = namespace
        whose = "" if namespace is None else f" of namespace {namespace!r}"
        if is_new_quota:
            super().__init__(
                f"cannot set a quota{whose} of {quota_blocks} blocks: {hard_pinned_blocks} are hard-pinned",
                "unpin something (GET /v1/pins), or set a larger quota",
            )
            return
        super().__init__(
            f"cannot pin {needed_blocks} more blocks: {available_blocks} left of a quota{whose} of "
            f"{quota_blocks} blocks, {hard_pinned_blocks} already hard-pinned",
            "unpin something (GET /v1/pins), raise pin_quota, or ask for a part with partial=True",
        )


class ResizeRefused(CapacityError):
    """The pool can't have the size asked for: running requests or hard pins need more. Nothing has changed.

    `num_blocks`: what was asked. `held_blocks`: what running requests hold. `hard_pinned_blocks`, `quota_blocks`: what
    hard pins hold, and what they may hold in a pool of that size.
    """

    code = "resize_refused"

    def __init__(self, num_blocks: int, held_blocks: int, hard_pinned_blocks: int, quota_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.held_blocks = held_blocks
        self.hard_pinned_blocks = hard_pinned_blocks
        self.quota_blocks = quota_blocks
        super().__init__(
            f"cannot resize to {num_blocks} blocks: {held_blocks} are held by running requests, {hard_pinned_blocks} "
            f"are hard-pinned, and pins may hold {quota_blocks} of so many",
            "wait for requests to finish, or release pins (GET /v1/pins)",
        )


class PromptTooLong(CapacityError):
    """A prompt that can never be served: longer than the model or than the memory. Raised by engine and server."""

    code = "context_length_exceeded"

    def __init__(self, num_prompt_tokens: int, limit_tokens: int, limited_by: str) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.limit_tokens = limit_tokens
        self.limited_by = limited_by
        super().__init__(
            f"the prompt has {num_prompt_tokens} tokens; at most {limit_tokens} fit ({limited_by})",
            "shorten the prompt, or serve with more --kv-memory or a model of longer context",
        )


class LifecycleError(LooseleafError, RuntimeError):
    """The caller's bug: a call that its object's state does not allow."""

    code = "lifecycle"


class LeaseClosed(LifecycleError):
    """The lease was released before."""

    code = "lease_closed"

    def __init__(self, request_id: str, call: str) -> None:
        self.request_id = request_id
        super().__init__(
            f"{call}() on the lease of request {request_id!r}, which is released",
            "a lease ends at its first release(); make a new one with cache.lease()",
        )


class CommitBeyondReserved(LifecycleError):
    """Asked to commit more tokens than are known or reserved, or fewer than are committed."""

    code = "commit_beyond_reserved"

    def __init__(self, asked_tokens: int, num_tokens: int, num_reserved_tokens: int, num_committed_tokens: int) -> None:
        self.asked_tokens = asked_tokens
        self.num_tokens = num_tokens
        self.num_reserved_tokens = num_reserved_tokens
        self.num_committed_tokens = num_committed_tokens
        super().__init__(
            f"cannot commit {asked_tokens} tokens: {num_tokens} known, {num_reserved_tokens} reserved, "
            f"{num_committed_tokens} committed before",
            "append the tokens and reserve room for them first; a commit only grows",
        )


class TruncateBelowCommitted(LifecycleError):
    """Asked to drop tokens that are written; only known but uncommitted ones can go."""

    code = "truncate_below_committed"

    def __init__(self, asked_tokens: int, num_committed_tokens: int) -> None:
        self.asked_tokens = asked_tokens
        self.num_committed_tokens = num_committed_tokens
        super().__init__(
            f"cannot truncate to {asked_tokens} tokens: {num_committed_tokens} are committed",
            "commit drafts only once they are accepted",
        )


class UnknownRequest(LifecycleError):
    """No live lease and none of the remembered finished requests has this id."""

    code = "unknown_request"

    def __init__(self, request_id: str, hint: str = "the last 10,000 finished requests are known") -> None:
        self.request_id = request_id
        super().__init__(f"no request {request_id!r} is known", hint)


class UnknownPin(LifecycleError):
    """No such pin: never made, undone before, or expired."""

    code = "unknown_pin"

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"no live pin {what}", "it may have expired; cache.pins() (GET /v1/pins) lists the live ones")


class UnknownSession(LifecycleError):
    """No such session: never named, ended before, or used too long ago."""

    code = "unknown_session"

    def __init__(self, session: str, namespace: str, num_known: int) -> None:
        self.session = session
        self.namespace = namespace
        super().__init__(
            f"no session {session!r} is known in namespace {namespace!r}",
            f"it may have ended; the last {num_known:,} sessions are known: cache.sessions() (GET /v1/sessions)",
        )


class TierError(LooseleafError):
    """The world's fault: counted and treated as a miss, never a failed request."""

    code = "tier_error"


class TierUnavailable(TierError):
    """A lower tier does not answer."""

    code = "tier_unavailable"


class PageCorrupt(TierError):
    """A page read from a lower tier fails its checksum."""

    code = "page_corrupt"


class LayoutMismatch(TierError):
    """A stored page has another layout (model revision, dtype, block size, rotary base)."""

    code = "layout_mismatch"


class ModelError(LooseleafError):
    """A model that cannot be loaded or served."""

    code = "model_error"


class UnsupportedModel(ModelError):
    """An architecture whose attention cannot be served from blocks; named, with what went wrong."""

    code = "unsupported_model"

    def __init__(self, architecture: str, why: str, hint: str | None = None) -> None:
        self.architecture = architecture
        super().__init__(f"cannot serve {architecture}: {why}", hint)


class IntegrityError(LooseleafError):
    """Our bug: an invariant does not hold. The message begins with its number (`I3: …`)."""

    code = "integrity"

    def __init__(self, invariant: str, facts: str) -> None:
        self.invariant = invariant
        super().__init__(f"{invariant}: {facts}", "this is a bug in looseleaf; please report it with the message")
