"""Text of the audit reports: five agencies, sections with the point that each adds to the summary."""

from __future__ import annotations

AGENCIES: tuple[dict, ...] = (
    {"agency": "the Inland Waterways Board", "unit": "locks", "act": "the Canal Repair Act", "users": "boat owners"},
    {"agency": "the Rural Bus Office", "unit": "bus stops", "act": "the Country Transport Act", "users": "passengers"},
    {"agency": "the Agency for Public Wells", "unit": "wells", "act": "the Clean Springs Act", "users": "households"},
    {
        "agency": "the School Buildings Service",
        "unit": "school roofs",
        "act": "the Safe Classrooms Act",
        "users": "teachers",
    },
    {
        "agency": "the Lighthouse Authority",
        "unit": "lights",
        "act": "the Coastal Signals Act",
        "users": "fishing crews",
    },
)

# (heading, text, point of the summary); earlier sections come first when a report is short
SECTIONS: tuple[tuple[str, str, str], ...] = (
    (
        "Background",
        "Under {act}, which was passed in {year}, {agency} is responsible for keeping {n1} {unit} in working order. "
        "[It took over this duty from the counties|Before that, each county had its own rules]. The law asks for "
        "three things: a complete register, a visit to every site within a fixed time, and a public report each year. "
        "Money comes partly from the budget and partly from fees paid by {users}. We were asked to find out whether "
        "the duty is met, what it costs, and what could be changed without a new law.",
        "{agency} has been responsible for {n1} {unit} since {act} was passed in {year}.",
    ),
    (
        "Funding",
        "In the year we examined, the agency received {n2} thousand crowns, of which {p1} percent came from fees. "
        "[Spending was below that sum|Not all of it was spent]: {p2} percent was carried over, mainly because "
        "contracts were signed late. Officials told us that the budget arrives in spring, when the building season "
        "has already begun, and that {users} pay their fees only in autumn. [We checked the accounts and found no "
        "misuse|Our check of the accounts found no sign of misuse]. We did find that two departments kept different "
        "figures for the same contracts.",
        "It received {n2} thousand crowns, {p1} percent of it from fees, and carried over {p2} percent because "
        "contracts were signed late.",
    ),
    (
        "Inspections",
        "The rules require that all {unit} be visited every two years. [We drew a sample of {n3} visit reports|We "
        "took {n3} visit reports] and compared them with the rules. In {p3} percent of the cases the visit took place "
        "too late, and in {p4} percent no visit could be proved at all. Late visits were most common where one "
        "inspector covers several districts. [Reports were often brief|Many of the reports had fewer than ten words]; "
        "some had been copied from the year before with a new date.",
        "Of {n3} visit reports, {p3} percent showed late visits and {p4} percent no proof of a visit.",
    ),
    (
        "Staffing",
        "The agency has {p5} inspectors, although {p6} posts are paid for. [Vacancies last more than a year on "
        "average|A vacant post stays empty for more than a year]. According to {director}, who directs the agency, "
        "the pay is too low to attract engineers, and those who come leave once they have been trained. We looked at "
        "the exit interviews. Pay was named in most of them, but the need to drive long distances alone was named "
        "almost as often.",
        "Only {p5} of {p6} inspector posts were filled, owing to low pay and long distances.",
    ),
    (
        "The Register",
        "A complete register is the basis of all planning. The register that we were given listed {n4} entries, "
        "[which is not the number laid down in the law|a figure that does not agree with the plan]. We visited {p7} "
        "places and found that some entries described {unit} that had been gone for years, while others were missing. "
        "The system was bought in {last} and cannot show changes. Staff therefore keep their own lists. [None of "
        "these lists agree|No two of these lists agree].",
        "The register, with {n4} entries, was found to be unreliable, and staff keep lists of their own.",
    ),
    (
        "Complaints",
        "During the period {n5} complaints were made by {users}. The agency answers {p8} percent of them within the "
        "month that its own charter promises. [A third concern the same few sites|Many concern the same few sites]. "
        "We followed a number of complaints from the first letter to the end. The letters were forwarded up to six "
        "times before anyone went to look, and in several cases the repair had been made by the complainants "
        "themselves.",
        "Of {n5} complaints by {users}, {p8} percent were answered in time.",
    ),
    (
        "Contracts",
        "Repairs are done by private firms. [For {p9} percent of the contracts there was only one bidder|A single "
        "firm made an offer for {p9} percent of the contracts]. Prices for the same work differ by a factor of three "
        "between districts, and the agency does not compare them. The contracts say nothing about delays. Officials "
        "agreed that a penalty clause would be useful, but feared that small firms would then stop making offers. "
        "Other agencies that we asked have had no such experience.",
        "There was a single bidder for {p9} percent of repair contracts, and prices were not compared.",
    ),
    (
        "Safety",
        "Accidents must be reported within a day. We found {p10} accidents in hospital records that the agency did "
        "not know of. [None of them was fatal|Fortunately nobody died]. The usual cause was a missing rail or a "
        "broken lamp, defects that had been noted on earlier visits. A note in a visit report does not lead to a "
        "repair by itself: someone has to copy it into a second form, and {p11} percent of the serious notes were "
        "never copied.",
        "Hospital records showed {p10} accidents unknown to the agency, and {p11} percent of serious defects were "
        "never passed on for repair.",
    ),
    (
        "Training",
        "New inspectors are meant to attend a course in {town}. [The course lasts {p12} days|It takes {p12} days] and "
        "was last revised long ago. Those who attended found it useful; most had begun work without it, because it is "
        "held once a year. The agency has started to record lessons so that they can be heard at any time. [We "
        "welcome this|We think this sensible], and suggest that the final test be kept as a meeting in person.",
        "The {p12}-day course in {town} is useful, but most inspectors start work before attending it.",
    ),
    (
        "A Comparison Abroad",
        "We also looked at a neighbouring country that has {n6} {unit} and fewer inspectors. There the sites are "
        "sorted by risk. A quiet site is seen every five years, a dangerous one every season. [Costs fell by a "
        "fifth|A fifth of the cost was saved] in four years, while the number of known defects rose, since people "
        "looked where there was something to find. The method needs a good register, which was built first.",
        "A neighbouring country with {n6} {unit} saves a fifth of the cost by sorting sites by risk.",
    ),
    (
        "Digital Services",
        "A website for {users} was opened in {last}. It was visited by {n7} people in its first year, and by less "
        "than half of them in the second. [Users could not find their own site on the map|The map did not show the "
        "smaller sites]. A defect can be reported, but the report is printed and sent to the district by post. The "
        "contract for the website ends soon. We advise against renewing it before the register has been put in order.",
        "The website of {last} drew {n7} visitors at first but does not pass reports on.",
    ),
)

DISTRICT = (
    "[In {place} we visited {sites} sites|We saw {sites} sites in {place}|Our visit to {place} covered {sites} "
    "sites], and [{late} of them were overdue for an inspection|for {late} of them no recent inspection was on file]. "
    "[The district is led by {head}, who had asked for help in writing|{head}, the head of the district, accompanied "
    "us|We spoke with the head of the district, {head}]. Repairs there cost {cost} crowns in the last season. "
    "[Records were kept with care|The archive had been flooded|Files were spread over two buildings]."
)

CLOSING = (
    "Recommendations and Agency Comments\nWe recommend that {agency} rebuild its register, sort its {unit} by risk, "
    "and fill the vacant posts with a premium for distant districts. In a written answer, {director} agreed with the "
    "first two points and promised a plan by the end of the year. On the third, the agency [said that pay is not in "
    "its hands|pointed to the ministry]. We will report again in two years."
)

SUMMARY_END = (
    "The auditors recommend a new register, a ranking of the {unit} by risk and a premium to fill vacant posts; the "
    "agency agreed to the first two points."
)
