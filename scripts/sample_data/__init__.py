"""The bundled sample suite: `suite()` builds it, one module per kind of text, all driven by `draw.Draw`."""

from __future__ import annotations

from . import chinese, code_files, documents, fewshot, meetings, multihop, papers, paragraphs, reports, story

# aimed at sizes of the five records: words of context, characters for the Chinese sets
SIZES: dict[str, tuple[int, ...]] = {
    "narrativeqa": (560, 850, 1200, 1500, 1850),
    "qasper": (520, 850, 1050, 1200, 1400),
    "multifieldqa_en": (520, 850, 1150, 1400, 1750),
    "hotpotqa": (500, 800, 1150, 1500, 1900),
    "2wikimqa": (500, 850, 1200, 1550, 1850),
    "musique": (520, 900, 1200, 1500, 1900),
    "gov_report": (650, 1000, 1300, 1600, 2000),
    "qmsum": (560, 850, 1150, 1400, 1700),
    "multi_news": (600, 900, 1050, 1200, 1350),
    "trec": (540, 800, 1100, 1450, 1900),
    "triviaqa": (520, 850, 1150, 1500, 1850),
    "samsum": (450, 700, 950, 1150, 1300),
    "passage_count": (530, 900, 1250, 1550, 2100),
    "passage_retrieval_en": (900, 1150, 1350, 1650, 1950),
    "lcc": (320, 480, 680, 850, 1080),
    "repobench-p": (320, 560, 780, 900, 990),
    "multifieldqa_zh": (420, 600, 850, 1050, 1280),
    "passage_retrieval_zh": (400, 560, 800, 1000, 1250),
}


def suite() -> dict[str, list[dict]]:
    """All records by dataset, in the order of `SIZES`; the same at every call."""
    multi = {name: multihop.build(name, SIZES[name]) for name in multihop.CHAINS}
    builders = {
        "narrativeqa": story.narrativeqa,
        "qasper": papers.qasper,
        "multifieldqa_en": documents.multifieldqa_en,
        "gov_report": reports.gov_report,
        "qmsum": meetings.qmsum,
        "multi_news": reports.multi_news,
        "trec": fewshot.trec,
        "triviaqa": fewshot.triviaqa,
        "samsum": fewshot.samsum,
        "passage_count": paragraphs.passage_count,
        "passage_retrieval_en": paragraphs.passage_retrieval_en,
        "lcc": code_files.lcc,
        "repobench-p": code_files.repobench_p,
        "multifieldqa_zh": chinese.multifieldqa_zh,
        "passage_retrieval_zh": chinese.passage_retrieval_zh,
    }
    return {name: multi[name] if name in multi else builders[name](sizes) for name, sizes in SIZES.items()}
