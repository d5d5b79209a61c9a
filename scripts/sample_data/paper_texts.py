"""Text of the papers: five topics, the sections that each paper has, and paragraphs for the longer ones."""

from __future__ import annotations

TOPICS: tuple[dict, ...] = (
    {
        "task": "dating undated postcards",
        "unit": "postcards",
        "source": "the attic of a closed post office",
        "signal": "the wording of the greeting",
        "language": "Frisian",
        "models": ("CardClock", "StampNet"),
        "use": "archivists who must sort large gifts",
        "wrong": "cards that quote older letters",
    },
    {
        "task": "finding rhymes that are no longer pronounced as such",
        "unit": "couplets",
        "source": "broadsides printed for harvest fairs",
        "signal": "the spelling of the last stressed vowel",
        "language": "Scots",
        "models": ("OldEcho", "RhymeLens"),
        "use": "historians of pronunciation",
        "wrong": "couplets with proper names at the end",
    },
    {
        "task": "predicting which recipe steps are left out by experienced cooks",
        "unit": "recipes",
        "source": "the notebooks of three boarding schools",
        "signal": "the order of the verbs",
        "language": "Catalan",
        "models": ("StepGuess", "LadleNet"),
        "use": "editors of old cookery books",
        "wrong": "recipes for preserves",
    },
    {
        "task": "linking weather remarks in ship logs to storms",
        "unit": "log entries",
        "source": "the files of a harbour insurance office",
        "signal": "the adverbs of degree",
        "language": "Danish",
        "models": ("GaleMatch", "BaroText"),
        "use": "climate researchers who need early records",
        "wrong": "entries written days after the event",
    },
    {
        "task": "detecting when a radio play changes its speaker",
        "unit": "scripts",
        "source": "a regional broadcaster that was dissolved",
        "signal": "forms of address",
        "language": "Slovene",
        "models": ("VoiceTurn", "WhoNow"),
        "use": "people who prepare audio editions",
        "wrong": "scenes in which a character speaks alone",
    },
)

QUESTIONS = (
    ("How many {unit} does the corpus contain?", "n1"),
    ("By how many points does {model} beat the bag-of-words baseline?", "d1"),
    ("How many volunteers annotated the {unit}?", "s1"),
    ("How many different word forms are in the corpus?", "n2"),
    ("How many hours does the training of {model} take?", "s3"),
)

SECTIONS: dict[str, list[str]] = {
    "Introduction": [
        "[The task of {task} is older than the computer|People have worried about {task} for a long time|Few would "
        "call {task} a solved problem]. It matters to {use}, [who so far work by hand|who have little time and less "
        "money]. Earlier systems look at the page as a whole and [miss what a trained reader sees at once|are easily "
        "fooled by copies]. We show that {signal} carries most of what is needed, and that a small model is enough to "
        "read it.",
        "Our contributions are three. First, we release {corpus}, a collection of {unit} in {language}. Second, we "
        "describe {model}, [a model that runs on a laptop|which needs no pretraining]. Third, we [study its "
        "errors|ask experts to study its errors] and find that most of them come from {wrong}.",
    ],
    "Related Work": [
        "[{lead} and {other} were the first to treat the question with statistics|Statistical work begins with {lead} "
        "and {other}]; they used {n5} hand-made rules and no learning at all. {third} later replaced the rules by "
        "word counts, [and most systems since then are variations of that idea|a choice that is still common]. Neural "
        "models have been tried, but [only on English|only with private data], which makes a comparison hard.",
    ],
    "Data": [
        "{corpus} contains {n1} {unit} taken from {source}. [The material was scanned in {place}|Scans were made in "
        "{place}] and typed twice; differences were settled by a third typist. In all there are {n2} different word "
        "forms. We set aside {n3} items for testing, [chosen so that no writer appears on both sides|drawn by writer "
        "and not by item].",
        "[Annotation was done by {s1} volunteers|A group of {s1} volunteers did the annotation], each of whom [had "
        "passed a test|was a native speaker]. They agreed in {s2} percent of all cases. Pairs of annotators discussed "
        "the rest, and where they could not agree the item was dropped.",
    ],
    "Model": [
        "{model} has two parts. The first reads {signal} and turns it into a short vector; the second compares that "
        "vector with a table of prototypes. [We use no more than {n6} parameters|The number of parameters is {n6}], "
        "[fewer than any system named above|which fit into the memory of a phone]. Dropout and early stopping are the "
        "only forms of regularisation.",
    ],
    "Experiments": [
        "Training takes {s3} hours on one processor. [We repeat it with five seeds and report means|All figures are "
        "means over five seeds]. The baselines are a bag of words, a character model and the rules of {lead}. The bag "
        "of words reaches {f1} and the character model {f2} points of accuracy.",
        "[On the test items {model} improves over the bag of words by {d1} points|{model} beats the bag of words by "
        "{d1} points on the test items]. The gain over the character model is smaller, {d2} points, but "
        "[significant|stable over all seeds]. The rules do well on frequent forms only.",
    ],
    "Error Analysis": [
        "We read {s4} errors one by one. The largest group are {wrong}; [here the model is confident and wrong|the "
        "model follows the surface and is misled]. A second group goes back to typing mistakes. [Only a few errors "
        "surprised the experts|The experts shared about half of these errors].",
    ],
    "Conclusion": [
        "We have presented {corpus} and {model} for {task}. The results suggest that {signal} deserves more "
        "attention. [In future work we want to treat a second language|We hope to extend the collection] and to ask "
        "{use} what they would change.",
    ],
}

OPTIONAL: dict[str, list[str]] = {
    "Introduction": [
        "A short example shows the difficulty. Two of the {unit} may agree in nearly every word and still differ in "
        "the one place that counts. [A reader who knows the period sees this without effort|Trained readers point to "
        "it at once], but cannot say how. Our aim is a system whose decision can be traced to such a place, because "
        "{use} will not trust a bare number. This wish has shaped most of our choices below.",
        "We do not claim that the method replaces reading. It proposes an order in which to read, and [it says how "
        "sure it is|it marks doubtful cases]. In a trial at {place}, this alone saved {s5} percent of the time that "
        "the staff had planned for the sorting, although the staff had been sceptical at the start.",
    ],
    "Related Work": [
        "A second line of work comes from forensic linguistics, where the question is who wrote a text. The features "
        "used there, such as function words, [are of little help to us|turn out to be nearly useless here], since our "
        "{unit} are short. What we do take over is the habit of reporting a result for each writer, so that one "
        "prolific hand cannot decide the mean.",
        "Work on {language} itself is rare. {other} built a tagger from {n4} sentences, and a spelling checker exists "
        "that was meant for schools. We use the tagger as it is. [The checker was of no use because it corrects "
        "precisely the forms that we need|We tried the checker and dropped it, because it removes the very forms that "
        "we need].",
    ],
    "Data": [
        "The licence allows any use. Names of living people were replaced by initials, and the owners of the material "
        "were asked for permission. [Three of them declined|Only a handful declined], and their items were taken out. "
        "For every item we keep the scan, both typed versions and the final one, so that later users can check our "
        "decisions and need not repeat the slow part.",
        "The items are not spread evenly. About {s6} percent come from a single decade, and the longest item is forty "
        "times as long as the shortest. [We did not balance the set, since a balanced set would not be like the "
        "archive|A balanced set would have been easier to learn but unlike any archive]. Instead we report results by "
        "period in the tables.",
    ],
    "Model": [
        "The table of prototypes is learned together with the rest. It starts with one prototype for each period and "
        "grows when an item is far from all of them, up to {s7} prototypes in the final model. [Each prototype can be "
        "printed as a list of words|A prototype may be read as a word list], and the annotators found {s8} percent of "
        "these lists plausible.",
        "We also tried an attention layer between the two parts. It made the model slower by a factor of {d3} and "
        "changed nothing in the results, [so we left it out|and it is not used below]. The same holds for a larger "
        "vector. We report this because the negative result may spare others the time.",
    ],
    "Experiments": [
        "The learning rate was chosen on a tenth of the training data. [We searched by hand and stopped early|The "
        "search was short], since the outcome hardly depends on it. With half of the training data the accuracy falls "
        "to {f3}, and with a quarter of it the model is no better than the rules. More data would therefore help, "
        "though the curve is getting flat.",
        "How far does the result depend on old spelling? To find out, we modernised the spelling of the test items "
        "with a word list. The accuracy of {model} is then {f4}, [less than before but far from chance|lower than "
        "before]. The bag of words loses more, {d4} points, because many of its features vanish.",
        "We then moved to a second archive without any training there. On its items {model} scores {f5}. [The drop is "
        "due to other habits of abbreviation|Abbreviations explain most of the drop]. After ten minutes of correction "
        "by an expert the figure rose to {f6}, which we find encouraging, since such corrections are part of the "
        "daily work anyway.",
        "People were tested as well. Two experts, who did not know the answers, reached {f7} on the same items and "
        "needed a week. When they could see the proposals of the system, they were faster by a factor of {d5}. [They "
        "changed their minds in few cases|In most cases they kept their first decision], and mostly for the better.",
    ],
    "Error Analysis": [
        "Confidence is a useful guide. When the model gives more than nine tenths to one answer, it is nearly always "
        "right; the trouble lies in the middle. [A threshold can be set so that a person sees only the doubtful "
        "items|Sending only the doubtful items to a person is therefore sensible]. With such a threshold the "
        "remaining errors fall by {d6} percent of all items, at the price of some reading.",
        "One error deserves a paragraph of its own. A whole bundle had been filed under a wrong year in {place}, and "
        "the model disagreed with the label of every item in it. [We first took this for a fault in the program|At "
        "first we searched for a bug]. The archive has since corrected its catalogue, and we have left the old labels "
        "in the data with a note.",
    ],
    "Conclusion": [
        "There are limits. The collection comes from one source, the writers were mostly [men of some "
        "schooling|townspeople], and a different archive may follow other habits. Also, the labels rest on the "
        "judgement of volunteers. We ask users to report doubtful labels and will publish corrections once a year.",
    ],
}
