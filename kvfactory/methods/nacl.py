from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvfactory.capability import Capability
from kvfactory.methods import register
from kvfactory.methods.base import PromptContext, TokenSelector
from kvfactory.ops.lottery import draw_positions
from kvfactory.ops.row_statistics import unmasked_sums
from kvfactory.ops.scores import column_sums
from kvfactory.ops.select import top_positions
from kvfactory.settings import Cell, MethodSettings, setting

LEAST_PROXIES = 32


@register("NACL")
class NACL(TokenSelector):
    """Keeps what a few proxy queries at the prompt's end attend to, and fills the rest of the budget by a draw.

    Paper: NACL: A General and Effective KV Cache Eviction Framework for LLMs at Inference Time, arXiv 2408.03675. Code:
    PaddlePaddle/Research, NLP/ACL2024-NACL. Departures: an absolute budget instead of shares of the prompt, the
    published code working from 25,700 tokens on only; causal scores; kv heads are scored by their whole group; draws
    come from a generator of (seed, example, layer).
    """

    @dataclass(frozen=True)
    class Settings(MethodSettings):
        sinks: int = setting(
            4,
            "first tokens that are always kept, inside the budget",
            authors=Cell("256", "read"),
            factory_mark="recalled",
        )
        window_size: int = setting(
            8,
            "most recent tokens kept, inside the budget",
            authors=Cell("1% of the prompt - 256", "read"),
            factory_mark="recalled",
        )
        nacl_proxy: int | None = setting(
            None,
            f"last prompt tokens whose queries score; - means 1% of the prompt, at least {LEAST_PROXIES}",
            authors=Cell("1% of the prompt", "read"),
            factory_mark="recalled",
        )
        nacl_random_share: float = setting(
            7 / 19,
            "part of the unprotected budget that is drawn",
            authors=Cell("7 of 19", "read"),
            factory_mark="recalled",
        )
        nacl_temperature: float = setting(
            1.0,
            "of the draw over scores; inf draws evenly",
            authors=Cell(1.0, "read"),
            factory_mark="recalled",
        )
        nacl_protect_proxy: bool = setting(
            False, "whether proxies are always kept", authors=Cell(False, "read"), factory_mark="recalled"
        )
        nacl_causal: bool = setting(
            True,
            "whether proxies see only what is before them",
            authors=Cell(False, "read"),
            factory_mark="recalled",
        )

        def proxies(self, prompt_len: int) -> int:
            """How many of the last queries score a prompt."""
            wanted = max(LEAST_PROXIES, math.ceil(prompt_len / 100)) if self.nacl_proxy is None else self.nacl_proxy
            return min(wanted, prompt_len)

        def recent(self, prompt_len: int) -> int:
            """How many of the last tokens are always kept."""
            return max(self.window_size, self.proxies(prompt_len) if self.nacl_protect_proxy else 0)

        def validate(self, budget: int | None) -> None:
            if self.sinks < 0:
                raise ValueError(f"--sinks {self.sinks} is negative")
            if self.window_size < 0:
                raise ValueError(f"--window_size {self.window_size} is negative")
            if self.nacl_proxy is not None and self.nacl_proxy < 1:
                raise ValueError(f"--nacl_proxy {self.nacl_proxy} leaves no query to score: give at least 1")
            if not 0 <= self.nacl_random_share <= 1:
                raise ValueError(f"--nacl_random_share {self.nacl_random_share} is not in [0, 1]")
            if not self.nacl_temperature > 0:
                raise ValueError(f"--nacl_temperature {self.nacl_temperature} must be above 0; inf draws evenly")
            if budget is not None:
                self.check_room(budget, prompt_len=budget + 1)

        def check_room(self, budget: int, prompt_len: int) -> None:
            """Refuses a budget that the protected tokens fill."""
            recent = self.recent(prompt_len)
            if self.sinks + recent < budget:
                return
            why = "--window_size" if recent == self.window_size else "--nacl_protect_proxy on"
            raise ValueError(
                f"--max_capacity_prompts {budget} must be larger than the {self.sinks} sinks (--sinks) and {recent} "
                f"recent tokens ({why}) that are kept inside it, for a prompt of {prompt_len} tokens"
            )

    capability = Capability(
        stage="prompt-evict",
        budget_means="slots per head",
        randomised=True,
        reference="arXiv 2408.03675; PaddlePaddle/Research, NLP/ACL2024-NACL",
    )

    def positions(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> torch.Tensor:
        s, S = self.settings, ctx.prompt_len
        s.check_room(ctx.budget, S)
        recent = s.recent(S)
        candidates = self.scores(q, k, v, ctx)
        free = self.kept(ctx) - s.sinks - recent
        drawn = math.floor(s.nacl_random_share * free)
        best = top_positions(candidates, free - drawn)
        lucky = draw_positions(
            candidates,
            drawn,
            s.nacl_temperature,
            ctx.generator(self.shape.layer_idx),
            taken=best,
            sampler=ctx.sampler,
        )
        ends = torch.cat([torch.arange(s.sinks), torch.arange(S - recent, S)]).to(k.device)
        parts = [ends.expand(*best.shape[:2], -1), best + s.sinks, lucky + s.sinks]
        return torch.cat(parts, dim=-1).sort(dim=-1).values

    def scores(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> torch.Tensor:
        """(B, Hs, S - sinks - recent): attention from the proxies to everything that is not protected."""
        s, S = self.settings, ctx.prompt_len
        sums = column_sums if s.nacl_causal else unmasked_sums
        total = sums(q, k, scale=self.scale, first_row=S - s.proxies(S))
        return self.per_stored_head(total[..., s.sinks : S - s.recent(S)])
