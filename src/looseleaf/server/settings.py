"""Settings of the HTTP server: who may do what, and limits of one request."""

from __future__ import annotations

from dataclasses import dataclass

from looseleaf.errors import ConfigError


@dataclass(frozen=True)
class ApiKey:
    """One client's key. `namespace`: what the client's requests share among themselves and with nobody else.
    `name`: owner of the pins that it asks for."""

    secret: str
    namespace: str
    name: str


@dataclass(frozen=True)
class ServerSettings:
    """What the server allows.

    `admin_key`: needed for pins, warming, clearing and resizing where set. `api_keys`: with any, every `/v1` route
    needs one. `chat_output_tokens`: most tokens of a chat answer that names no limit. `max_choices`: choices
    of one request, over all of its prompts. `request_pins`: whether requests may ask for a pin
    (`prompt_cache_retention`, `cache_control`). `max_request_pin_seconds`: longest time to live of such a pin.
    `remembered_tokens`: tokens of past turns that are remembered, so that the next one goes on from the very tokens
    that were generated; 0: prompts are what the template says, and no drift is reported. `shared_salts`: salts of
    layers that mean the same namespace for every key, so that a common beginning is stored once; what the admin
    computes or pins with such a `cache_salt` is there for all. `model_revision`: names the weights by what they are; it
    becomes a part of every namespace.
    """

    admin_key: str | None = None
    api_keys: tuple[ApiKey, ...] = ()
    chat_output_tokens: int = 1024
    max_choices: int = 128
    request_pins: bool = True
    max_request_pin_seconds: float = 86_400.0
    remembered_tokens: int = 4 * 2**20
    shared_salts: tuple[str, ...] = ()
    model_revision: str | None = None

    def __post_init__(self) -> None:
        """Refuse values that make no sense.

        Raises:
            ConfigError: a key is empty or given twice, or a limit is below its least.
        """
        secrets = [key.secret for key in self.api_keys]
        if self.admin_key is not None:
            secrets.append(self.admin_key)
        if not all(secrets):
            raise ConfigError("a key is the empty string", "leave the setting out to need no key")
        if len(set(secrets)) != len(secrets):
            raise ConfigError(
                f"{len(secrets)} keys are given, {len(set(secrets))} differ", "give each a key of its own"
            )
        for name in ("chat_output_tokens", "max_choices", "max_request_pin_seconds", "remembered_tokens"):
            least = 0 if name == "remembered_tokens" else 1
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be at least {least}")
