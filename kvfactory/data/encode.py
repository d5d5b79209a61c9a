"""Prompt text to token ids, and generated ids to prediction text.

The order is LongBench's (THUDM/LongBench, LongBench/pred.py): tokenise with special tokens, cut the middle out when
the prompt is over the limit, decode the two halves, wrap, tokenise again. Tokenising decoded text is not the identity
(tokens merge or split at the joint), so the final length can differ from the limit by a few tokens; budgets follow
the final ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from kvfactory.data.tasks import Task, get_task
from kvfactory.data.templates import THINK_CLOSE, THINK_OPEN, choose_wrap, model_family, parse_thinking, template_sha256

WINDOW_LIMITS = {4096: 3500, 8192: 7500, 32768: 31500, 131072: 127500}
FACTORY_LIMITS = {"llama2": 3950, "llama3": 7500, "mistral": 31500}
WINDOW_RESERVE = 64  # tokens left for a chat wrap where no table entry says otherwise
TURN_END_TOKENS = ("<|eot_id|>", "<|end_of_text|>")
SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class EncodedPrompt:
    """One prompt as the model sees it.

    Attributes:
        input_ids: (S,) int64.
        prompt_tokens: S.
        prompt_tokens_raw: tokens of the uncut prompt with special tokens, the number compared with the limit.
        truncated: whether the middle was cut out.
        question_seen: whether all of the record's `input` is outside the removed middle; true when there is none.
        template_tail_tokens: tokens at the end that are chat template; `min` with a window gives its share of it.
        head_text, tail_text: the first and last 200 characters of the final text.
        notes: sentences that the user should see once.
    """

    input_ids: torch.LongTensor
    prompt_tokens: int
    prompt_tokens_raw: int
    truncated: bool
    question_seen: bool
    template_tail_tokens: int
    head_text: str
    tail_text: str
    notes: tuple[str, ...] = ()


class PromptEncoder:
    """Everything between a prompt text and a prediction text that depends on the tokenizer.

    Args:
        tokenizer: a Hugging Face tokenizer, fast or slow.
        model_config: the model's config; `model_type`, the window and (without `generation_config`) `eos_token_id`
            are read. None where prompts are only counted: no window is known then.
        protocol, chat_template, thinking, force_chat: see `kvfactory.data.templates.choose_wrap`.
        max_input_length: prompt limit in tokens before the chat wrap; None follows the protocol's table.
        generation_config: the checkpoint's, for its stop ids.
        stop_newline: datasets that stop at a newline besides those of the task table.
        min_one_token: the first new token is never a stop on any dataset.
        legacy_decode_cleanup: apply the tokenizer's space clean-up when decoding, as transformers before 5 did where
            the tokenizer's file asks for it (protocol factory always does).

    Raises:
        ValueError: what `choose_wrap` raises; a limit below 2.
    """

    def __init__(
        self,
        tokenizer,
        model_config,
        *,
        protocol: str = "longbench",
        chat_template: str = "longbench",
        thinking: str | int = "off",
        max_input_length: int | None = None,
        force_chat: bool = False,
        generation_config=None,
        stop_newline: Iterable[str] = (),
        min_one_token: bool = False,
        legacy_decode_cleanup: bool = False,
    ):
        if max_input_length is not None and max_input_length < 2:
            raise ValueError(f"--max_input_length {max_input_length} must be at least 2, one token for each half.")
        self.tokenizer = tokenizer
        self.protocol = protocol
        self.wrap = choose_wrap(model_config, tokenizer, protocol, chat_template, thinking, force_chat)
        self.family = model_family(model_config, tokenizer)
        self.max_input_length = max_input_length
        self.window = _window(model_config)
        self._thinking_budget = parse_thinking(thinking)
        self._newline_stop = frozenset(get_task(name).name for name in stop_newline)
        self._min_one_token = min_one_token or protocol == "factory"
        # transformers 4.44, under which the original ran, cleaned up unless the tokenizer's file said no.
        self._cleanup = (protocol == "factory" or legacy_decode_cleanup) and bool(
            getattr(tokenizer, "init_kwargs", {}).get("clean_up_tokenization_spaces", True)
        )
        self._base_stops = _stop_ids(tokenizer, model_config, generation_config)
        vocabulary = tokenizer.get_vocab()
        self._think_open, self._think_close = vocabulary.get(THINK_OPEN), vocabulary.get(THINK_CLOSE)

    def wraps(self, task: Task) -> bool:
        """Whether prompts of this task are chat-wrapped."""
        return self.wrap.kind != "bare" and (task.chat or self.wrap.every_dataset)

    def thinking_budget(self, task: Task | None = None) -> int:
        """Tokens to allow on top of max_new_tokens for the thinking block; 0 for a task that is not wrapped."""
        return 0 if task is not None and not self.wraps(task) else self._thinking_budget

    def limit(self, max_new_tokens: int) -> int:
        """Most tokens a prompt may have before it is cut.

        `--max_input_length`, else by the model's window (protocol longbench) or its family (factory). A thinking
        budget is taken off the window's limit, since the block has to fit as well.
        """
        if self.max_input_length is not None:
            return self.max_input_length
        if self.protocol == "factory":
            if self.family not in FACTORY_LIMITS:
                raise ValueError(
                    f"--protocol factory has no length limit for model type {self.family!r}, only for "
                    f"{', '.join(FACTORY_LIMITS)}; pass --max_input_length."
                )
            return FACTORY_LIMITS[self.family]
        if self.window is None:
            raise ValueError("the model's config gives no max_position_embeddings; pass --max_input_length.")
        room = self.window - max_new_tokens - self._thinking_budget - WINDOW_RESERVE
        limit = WINDOW_LIMITS.get(self.window, room)
        if self._thinking_budget:
            limit = min(limit, room)
        if limit < 2:
            raise ValueError(
                f"--max_new_tokens {max_new_tokens} leaves no room for a prompt in the model's window of {self.window} "
                "tokens; lower it (or --thinking), or pass --max_input_length."
            )
        return limit

    def encode(
        self, task: Task, prompt_text: str, max_new_tokens: int, record_input: str | None = None
    ) -> EncodedPrompt:
        """Token ids of one prompt.

        Args:
            prompt_text: the filled-in prompt, not wrapped. Unpaired surrogates, which no tokenizer takes, become
                U+FFFD.
            max_new_tokens: the task's generation limit without the thinking budget.
            record_input: the record's `input`, for `question_seen`.

        Raises:
            ValueError: the final prompt and its new tokens do not fit the model's window.
        """
        wraps = self.wraps(task)
        text = _without_lone_surrogates(prompt_text)
        if wraps and self.wrap.before_cut:
            text = self.wrap.render(text)
        ids, spans = self._tokenize(text, add_special_tokens=True)
        raw_tokens, limit = len(ids), self.limit(max_new_tokens)
        truncated, question_seen = raw_tokens > limit, True
        if truncated:
            half = limit // 2
            first, second = self._decode(ids[:half]), self._decode(ids[-half:])
            question_seen = _survives(record_input, text, spans, half, (first, second))
            text = first + second
        if wraps and not self.wrap.before_cut:
            text = self.wrap.render(text)
        specials = self.wrap.add_special_tokens if wraps else True
        ids, spans = self._tokenize(text, specials)
        self._check_bos(ids, text, specials)
        notes = self._check_window(len(ids), max_new_tokens + self.thinking_budget(task))
        return EncodedPrompt(
            input_ids=torch.tensor(ids, dtype=torch.long),
            prompt_tokens=len(ids),
            prompt_tokens_raw=raw_tokens,
            truncated=truncated,
            question_seen=question_seen,
            template_tail_tokens=self._tail_tokens(text, spans) if wraps else 0,
            head_text=text[:SHOWN_CHARACTERS],
            tail_text=text[-SHOWN_CHARACTERS:],
            notes=notes,
        )

    def encode_whole(self, task: Task, text: str, max_new_tokens: int, answer_prefix: str = "") -> EncodedPrompt:
        """Token ids of a prompt that must not be cut, with the words that the model's answer is to begin with.

        Args:
            text: the prompt, not wrapped.
            answer_prefix: follows the chat wrap, so that the model goes on from it.

        Raises:
            ValueError: the prompt and its new tokens do not fit the model's window.
        """
        ids, spans, final = self._whole(task, text, answer_prefix)
        new_tokens = max_new_tokens + self.thinking_budget(task)
        if self.window is not None and len(ids) + new_tokens > self.window:
            raise ValueError(
                f"a prompt of {len(ids)} tokens and {new_tokens} new ones do not fit the model's window of "
                f"{self.window}, and a prompt of this benchmark is not cut: take a shorter length"
            )
        return EncodedPrompt(
            input_ids=torch.tensor(ids, dtype=torch.long),
            prompt_tokens=len(ids),
            prompt_tokens_raw=len(ids),
            truncated=False,
            question_seen=True,
            template_tail_tokens=self._tail_tokens(final, spans) if self.wraps(task) and not answer_prefix else 0,
            head_text=final[:SHOWN_CHARACTERS],
            tail_text=final[-SHOWN_CHARACTERS:],
        )

    def count_whole(self, task: Task, text: str, answer_prefix: str = "") -> int:
        """Tokens of the prompt that `encode_whole` makes."""
        return len(self._whole(task, text, answer_prefix)[0])

    def _whole(self, task: Task, text: str, answer_prefix: str) -> tuple[list[int], list[tuple[int, int]] | None, str]:
        wraps = self.wraps(task)
        text = _without_lone_surrogates(text)
        final = (self.wrap.render(text) if wraps else text) + answer_prefix
        specials = self.wrap.add_special_tokens if wraps else True
        ids, spans = self._tokenize(final, specials)
        self._check_bos(ids, final, specials)
        return ids, spans, final

    def stop_ids(self, task: Task) -> list[int]:
        """Token ids that end the generation: the checkpoint's, the turn ends, and a newline where the task asks."""
        if not task.newline_stop and task.name not in self._newline_stop:
            return list(self._base_stops)
        newline = self.tokenizer.encode("\n", add_special_tokens=False)[-1]
        return list(dict.fromkeys([*self._base_stops, newline]))

    def min_new_tokens(self, task: Task) -> int:
        """1 where the first new token cannot be a stop: samsum, or every dataset in protocol factory."""
        return int(self._min_one_token or task.newline_stop)

    def decode(self, new_ids: torch.Tensor | Sequence[int], task: Task | None = None) -> tuple[str, int]:
        """(prediction text, tokens of the thinking block) of the ids generated for one prompt.

        Special tokens are skipped and nothing is stripped, except that the newlines which separate a thinking block
        from its answer go with the block. A block that was not closed within the limit leaves an empty prediction.

        Args:
            task: tells whether the prompt was wrapped (None: it was), which decides if it ended inside a block.
        """
        ids = new_ids.tolist() if isinstance(new_ids, torch.Tensor) else list(new_ids)
        if not self.wrap.thinking or (task is not None and not self.wraps(task)):
            return self._decode(ids), 0
        if self._think_close in ids:
            end = len(ids) - ids[::-1].index(self._think_close)
            return self._decode(ids[end:]).lstrip("\n"), end
        if self.wrap.opens_thinking or (self._think_open is not None and self._think_open in ids):
            return "", len(ids)
        return self._decode(ids), 0

    def window_text(self, prompt: EncodedPrompt, window: int, skip: int = 0) -> str:
        """The text of the `window` tokens before a prompt's last `skip` ones, special tokens shown (the observation
        window)."""
        end = prompt.prompt_tokens - skip
        ids = prompt.input_ids[max(0, end - window) : end].tolist()
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def describe(self) -> dict:
        """What the run record says about prompts."""
        return {
            "protocol": self.protocol,
            "family": self.family,
            "chat_wrap": self.wrap.kind,
            "chat_head": self.wrap.head,
            "chat_tail": self.wrap.tail,
            "chat_template_sha256": template_sha256(self.tokenizer),
            "thinking_budget": self._thinking_budget,
            "max_input_length": self.max_input_length,
            "window": self.window,
            "decode_cleanup": self._cleanup,
            "stop_ids": list(self._base_stops),
        }

    def _tokenize(self, text: str, add_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]] | None]:
        # verbose=False: prompts over the tokenizer's nominal length are expected here and cut by us.
        fast = bool(getattr(self.tokenizer, "is_fast", False))
        encoded = self.tokenizer(
            text, add_special_tokens=add_special_tokens, return_offsets_mapping=fast, verbose=False
        )
        return list(encoded["input_ids"]), encoded["offset_mapping"] if fast else None

    def _decode(self, ids: list[int]) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return self.tokenizer.clean_up_tokenization(text) if self._cleanup else text

    def _tail_tokens(self, text: str, spans: list[tuple[int, int]] | None) -> int:
        tail = self.wrap.tail
        if not tail or not text.endswith(tail):
            return 0
        if spans is None:
            return len(self._tokenize(tail, add_special_tokens=False)[0])
        start = len(text) - len(tail)
        return sum(begin >= start and end > begin for begin, end in spans)

    def _check_bos(self, ids: list[int], text: str, added: bool) -> None:
        bos, token = self.tokenizer.bos_token_id, self.tokenizer.bos_token
        if bos is None or self.wrap.kind == "tokenizer":
            return  # a model's own template may repeat the token (SmolLM2's BOS opens every turn)
        assert ids.count(bos) <= text.count(token) + added, "the beginning-of-text token was added twice"

    def _check_window(self, prompt_tokens: int, new_tokens: int) -> tuple[str, ...]:
        """Notes on a prompt that does not fit and runs all the same; ValueError where it must not."""
        if self.window is None or prompt_tokens + new_tokens <= self.window:
            return ()
        sentence = (
            f"a prompt of {prompt_tokens} tokens and {new_tokens} new ones do not fit the model's window of "
            f"{self.window}; lower --max_input_length"
        )
        if self.protocol == "factory" and prompt_tokens <= self.window:
            # The original ran such prompts (3,950 + 512 on Llama-2), so its protocol must be able to.
            return (f"{sentence} (--protocol factory goes on, as the original did).",)
        raise ValueError(f"{sentence} (the chat wrap is added after the cut).")


def _window(model_config) -> int | None:
    inner = getattr(model_config, "text_config", None) or model_config
    value = getattr(inner, "max_position_embeddings", None)
    return int(value) if value else None


def _stop_ids(tokenizer, model_config, generation_config) -> list[int]:
    source = model_config if generation_config is None else generation_config
    eos = getattr(source, "eos_token_id", None)
    found = [] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [eos]
    found.append(tokenizer.eos_token_id)
    vocabulary = tokenizer.get_vocab()
    found.extend(vocabulary.get(token) for token in TURN_END_TOKENS)
    return list(dict.fromkeys(int(i) for i in found if i is not None))


def _survives(
    record_input: str | None, text: str, spans: list[tuple[int, int]] | None, half: int, halves: tuple[str, str]
) -> bool:
    """Whether the last occurrence of `record_input` in the uncut `text` lies outside the removed middle.

    Without character spans (slow tokenizers) it is looked for in the decoded halves, whitespace apart.
    """
    question = _without_lone_surrogates(record_input or "").strip()
    if not question:
        return True
    if spans is None:
        wanted = "".join(question.split())
        return any(wanted in "".join(kept.split()) for kept in halves)
    start = text.rfind(question)
    if start < 0:
        return False
    end = start + len(question)
    removed = [span for span in spans[half : len(spans) - half] if span[1] > span[0]]
    return not any(begin < end and stop > start for begin, stop in removed)


def _without_lone_surrogates(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
