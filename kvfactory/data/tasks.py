"""Facts about the 21 LongBench datasets and the 13 LongBench-E sets.

Facts only: prompt texts are LongBench's own and are read at run time (`kvfactory.data.prompts`).
Source: THUDM/LongBench, LongBench/{pred.py,eval.py,config/} and LongBench/task.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvfactory.registry import unknown_name


@dataclass(frozen=True)
class Task:
    """What the harness must know of one dataset besides its prompt.

    Attributes:
        metric: name in `kvfactory.metrics`.
        language: "en", "zh" or "code"; code sets are scored by edit similarity.
        max_new_tokens: generation limit in tokens.
        category: one of the six LongBench categories.
        examples: records in the full dataset.
        chat: whether the prompt is chat-wrapped (few-shot and code sets are continuations and are not).
        first_line: score only the first line of the prediction.
        newline_stop: the newline token stops the generation, and the first token cannot be a stop.
    """

    name: str
    metric: str
    language: str
    max_new_tokens: int
    category: str
    examples: int = 200
    chat: bool = True
    first_line: bool = False
    newline_stop: bool = False


_FEW_SHOT = {"chat": False, "first_line": True}
TASKS: dict[str, Task] = {
    t.name: t
    for t in (
        Task("narrativeqa", "qa_f1_score", "en", 128, "single_doc_qa"),
        Task("qasper", "qa_f1_score", "en", 128, "single_doc_qa"),
        Task("multifieldqa_en", "qa_f1_score", "en", 64, "single_doc_qa", examples=150),
        Task("multifieldqa_zh", "qa_f1_zh_score", "zh", 64, "single_doc_qa"),
        Task("hotpotqa", "qa_f1_score", "en", 32, "multi_doc_qa"),
        Task("2wikimqa", "qa_f1_score", "en", 32, "multi_doc_qa"),
        Task("musique", "qa_f1_score", "en", 32, "multi_doc_qa"),
        Task("dureader", "rouge_zh_score", "zh", 128, "multi_doc_qa"),
        Task("gov_report", "rouge_score", "en", 512, "summarization"),
        Task("qmsum", "rouge_score", "en", 512, "summarization"),
        Task("multi_news", "rouge_score", "en", 512, "summarization"),
        Task("vcsum", "rouge_zh_score", "zh", 512, "summarization"),
        Task("trec", "classification_score", "en", 64, "few_shot", **_FEW_SHOT),
        Task("triviaqa", "qa_f1_score", "en", 32, "few_shot", **_FEW_SHOT),
        Task("samsum", "rouge_score", "en", 128, "few_shot", newline_stop=True, **_FEW_SHOT),
        Task("lsht", "classification_score", "zh", 64, "few_shot", **_FEW_SHOT),
        Task("passage_count", "count_score", "en", 32, "synthetic"),
        Task("passage_retrieval_en", "retrieval_score", "en", 32, "synthetic"),
        Task("passage_retrieval_zh", "retrieval_zh_score", "zh", 32, "synthetic"),
        Task("lcc", "code_sim_score", "code", 64, "code", examples=500, chat=False),
        Task("repobench-p", "code_sim_score", "code", 64, "code", examples=500, chat=False),
    )
}

CHINESE_DATASETS = tuple(t.name for t in TASKS.values() if t.language == "zh")
DEFAULT_DATASETS = tuple(name for name in TASKS if name not in CHINESE_DATASETS)
LONGBENCH_E = tuple(f"{name}_e" for name in DEFAULT_DATASETS if name not in ("narrativeqa", "musique", "qmsum"))
CATEGORIES = tuple(dict.fromkeys(t.category for t in TASKS.values()))
LENGTH_BUCKETS = (("0-4k", 0, 4000), ("4-8k", 4000, 8000), ("8k+", 8000, None))


def canonical_dataset(name: str) -> str:
    """The canonical dataset name (LongBench-E names keep their `_e`); ValueError with near matches otherwise."""
    lowered = str(name).strip().lower()
    if lowered in TASKS or lowered in LONGBENCH_E:
        return lowered
    raise ValueError(unknown_name("dataset", name, [*TASKS, *LONGBENCH_E]))


def get_task(dataset: str) -> Task:
    """The task of a dataset; a LongBench-E set has the task of its name without `_e`."""
    name = canonical_dataset(dataset)
    return TASKS[name.removesuffix("_e")] if name in LONGBENCH_E else TASKS[name]
