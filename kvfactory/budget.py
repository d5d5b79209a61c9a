"""The budget of a run: how many prompt tokens a method may keep, and how a ratio or a share of bytes becomes tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

DEFAULT_CAPACITY = 512


@dataclass(frozen=True)
class Budget:
    """Exactly one of the three ways to state a budget.

    Attributes:
        tokens: kept prompt tokens per stored head and layer, window included.
        ratio: fraction of the prompt kept, 0 < ratio <= 1; tokens = round(prompt length * ratio).
        bytes_percent: stored bytes as a percentage of FullKV's at the same prompt, 0 < percent <= 100.
    """

    tokens: int | None = None
    ratio: float | None = None
    bytes_percent: float | None = None

    def __post_init__(self) -> None:
        given = [v for v in (self.tokens, self.ratio, self.bytes_percent) if v is not None]
        if len(given) != 1:
            raise ValueError(
                "give exactly one of --max_capacity_prompts, --max_capacity_prompts_ratio and --budget_bytes, "
                f"not {len(given)} of them"
            )
        if self.tokens is not None:
            if isinstance(self.tokens, (bool, str)) or self.tokens % 1 != 0:
                raise ValueError(f"--max_capacity_prompts {self.tokens!r} is not a whole number of tokens")
            object.__setattr__(self, "tokens", int(self.tokens))
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"--max_capacity_prompts {self.tokens} keeps nothing: give at least 1 token per head")
        if self.ratio is not None and not 0 < self.ratio <= 1:
            raise ValueError(
                f"--max_capacity_prompts_ratio {self.ratio} is not in (0, 1], the fraction of the prompt kept"
            )
        if self.bytes_percent is not None and not 0 < self.bytes_percent <= 100:
            raise ValueError(f"--budget_bytes {self.bytes_percent}% is not in (0, 100], the share of FullKV's bytes")

    @classmethod
    def of(cls, tokens: int | None = None, ratio: float | None = None, bytes_percent: float | None = None) -> Budget:
        """A budget from optional parts: -1 tokens counts as not given, and nothing given means 512 tokens."""
        tokens = None if tokens == -1 else tokens
        if tokens is None and ratio is None and bytes_percent is None:
            tokens = DEFAULT_CAPACITY
        return cls(tokens, ratio, bytes_percent)

    @property
    def tag(self) -> str:
        """The part of a run folder's name: 512, r0.2 or bytes25."""
        if self.tokens is not None:
            return str(self.tokens)
        return f"r{self.ratio:g}" if self.ratio is not None else f"bytes{self.bytes_percent:g}"

    def resolve(self, prompt_len: int, stored_bytes: Callable[[int], int] | None = None, full_bytes: int = 0) -> int:
        """Tokens per stored head for a prompt of `prompt_len` tokens.

        Args:
            stored_bytes: bytes a method declares to store at a budget of so many tokens (non-decreasing below the
                prompt length); needed for a budget in bytes only.
            full_bytes: bytes of FullKV for this prompt.
        """
        if self.tokens is not None:
            return self.tokens
        if self.ratio is not None:
            return max(1, round(prompt_len * self.ratio))
        assert stored_bytes is not None
        allowed = full_bytes * self.bytes_percent / 100
        if stored_bytes(prompt_len) <= allowed:
            return prompt_len
        low, high = 0, prompt_len - 1  # the largest budget below the prompt length that fits
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if stored_bytes(middle) <= allowed else (low, middle - 1)
        if low == 0:
            raise ValueError(
                f"--budget_bytes {self.bytes_percent:g}% is less than one token per head, which takes "
                f"{100 * stored_bytes(1) / full_bytes:.1f}% of FullKV's bytes together with what is never compressed"
            )
        return low

    def check_resolved(self, tokens: int, prompt_len: int, validate: Callable[[int], None]) -> None:
        """Checks what a ratio or a share of bytes came to, by the method's own rule for a number of tokens.

        Args:
            tokens: what `resolve` returned for a prompt of `prompt_len` tokens.
            validate: raises ValueError for a budget that the method's settings leave no room in.

        Raises:
            ValueError: with the flag that gave the budget in front of the method's sentence.
        """
        if self.tokens is not None or tokens >= prompt_len:
            return
        try:
            validate(tokens)
        except ValueError as error:
            given = (
                f"--max_capacity_prompts_ratio {self.ratio:g}"
                if self.ratio is not None
                else f"--budget_bytes {self.bytes_percent:g}%"
            )
            rule = str(error).replace(f"--max_capacity_prompts {tokens} ", f"a budget of {tokens} ")
            raise ValueError(f"{given} keeps {tokens} of {prompt_len} prompt tokens: {rule}") from error
