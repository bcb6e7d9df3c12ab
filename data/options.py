"""The part of the data config that determines the tokens of a row."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from config.schema import DataConfig
from data.sources import CHAT_FORMATS


@dataclass(frozen=True)
class RenderOptions:
    """The part of the data config that determines the tokens of a row."""

    format: str
    columns: dict[str, str]
    as_chat: bool
    supervise: str
    max_length: int
    on_too_long: str
    ignore_keys: Sequence[str] = ()
    roles: dict[str, str] = field(default_factory=dict)
    special_tokens_in_text: str = DataConfig.special_tokens_in_text

    @classmethod
    def of(cls, config: DataConfig) -> "RenderOptions":
        return cls(**{name: getattr(config, name) for name in cls.__dataclass_fields__})

    @property
    def is_chat(self) -> bool:
        return self.format in CHAT_FORMATS or (self.as_chat and self.format != "text")
