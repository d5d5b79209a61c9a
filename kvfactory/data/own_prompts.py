"""kvfactory's own wording of the LongBench tasks, used where the official prompt files are not present.

The texts keep what the scoring relies on: where the context and the input stand, the language, the answer format,
and a cue at the end that the model continues. Few-shot records bring their own cue inside `input` (`Type:`,
`Answer:`, `Summary:`), so nothing follows it. Scores obtained with these texts are not comparable with published ones.
"""

from __future__ import annotations

_PASSAGES_QA = (
    "Below are several passages. One or more of them contain what is needed to answer a question that comes after "
    "them.\n\n{context}\n\nUsing the passages above, reply with the bare answer: a name, a date, a number or a few "
    "words, without a sentence around it.\n\nQuestion: {input}\nAnswer:"
)

OWN_PROMPTS: dict[str, str] = {
    "narrativeqa": (
        "Here is the text of a book or of a film script. A question about it comes at the end.\n\nText: {context}\n\n"
        "That was the text. Reply to the question with a short phrase and no explanation.\n\n"
        "Question: {input}\n\nAnswer:"
    ),
    "qasper": (
        "Here is a research paper. A question about it comes at the end.\n\nPaper: {context}\n\n"
        'Reply to the question with a short phrase or one sentence. For a yes/no question reply "yes" or "no". When '
        'the paper does not say, reply "unanswerable".\n\nQuestion: {input}\n\nAnswer:'
    ),
    "multifieldqa_en": (
        "Study this text; a question about it follows.\n\n{context}\n\n"
        "Reply with the bare answer taken from the text.\n\nQuestion: {input}\nAnswer:"
    ),
    "multifieldqa_zh": (
        "请先阅读这篇文章，文章之后有一个问题。\n\n{context}\n\n根据文章内容用中文作答，直接写出答案即可，不必解释。"
        "\n\n问题：{input}\n回答："
    ),
    "hotpotqa": _PASSAGES_QA,
    "2wikimqa": _PASSAGES_QA,
    "musique": _PASSAGES_QA,
    "dureader": (
        "下面是几篇搜索到的资料，资料之后有一个问题。\n\n资料：{context}\n\n请依据这些资料作答。\n\n问题：{input}\n回答："
    ),
    "gov_report": (
        "The following document was published by a public authority.\n\nDocument:\n{context}\n\n"
        "Condense the document into about one page.\n\nSummary:"
    ),
    "qmsum": (
        "These are the minutes of a meeting, speaker by speaker. A request about them comes at the end.\n\n"
        "Minutes:\n{context}\n\nFulfil the request in a few sentences, from the minutes alone.\n\n"
        "Request: {input}\nAnswer:"
    ),
    "multi_news": (
        "Several articles that report on the same event follow.\n\nArticles:\n{context}\n\n"
        "Condense all the articles together into about one page.\n\nSummary:"
    ),
    "vcsum": "以下是一次会议的发言内容。\n\n发言内容：\n{context}\n\n请用一段话概括这次会议讨论了什么。\n\n会议总结：",
    "trec": (
        "Each question below is followed by the category it belongs to. Give the category of the last question in the "
        "same way.\n\n{context}\n{input}"
    ),
    "triviaqa": (
        "Each passage below comes with a question and its short answer. Answer the last question in the same way, with "
        "nothing but the answer.\n\n{context}\n\n{input}"
    ),
    "samsum": (
        "Each conversation below comes with a summary of a sentence or two. Summarise the last conversation in the "
        "same way.\n\n{context}\n\n{input}"
    ),
    "lsht": "下面每条新闻之后都给出了它所属的类别。请按同样的方式给出最后一条新闻的类别。\n\n{context}\n{input}",
    "passage_count": (
        "The numbered paragraphs below may contain exact repeats. Work out how many different paragraphs are left when "
        "every repeat is dropped.\n\n{context}\n\nReply with one number in digits and nothing else.\n\n"
        "Number of different paragraphs: "
    ),
    "passage_retrieval_en": (
        "Below are numbered paragraphs, and after them a summary of one of these paragraphs.\n\n{context}\n\n"
        'Summary:\n\n{input}\n\nWhich paragraph does the summary describe? Reply in the form "Paragraph 7", with the '
        "right number.\n\nThe summary describes: "
    ),
    "passage_retrieval_zh": (
        "下面是带编号的段落，段落之后是其中某一段的概要。\n\n{context}\n\n概要：\n\n{input}\n\n"
        "这个概要说的是哪一段？请按“段落7”这样的格式写出正确的编号。\n\n对应的段落是："
    ),
    "lcc": "The source file below breaks off. Write the line that follows.\n{context}The following line is:\n",
    "repobench-p": (
        "Parts of a repository and a source file that breaks off are below. Write the line that follows.\n"
        "{context}{input}The following line is:\n"
    ),
}
