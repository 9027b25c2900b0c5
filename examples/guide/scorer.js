// Which results of the search stand first: the page that says what to do before the lists that hold every word.
var Scorer = {  // which Sphinx looks for, and declares itself where there is none
  score: ([docname, title, anchor, descr, score, filename, kind]) => {
    const query = new URLSearchParams(window.location.search).get("q") || "";
    if (docname === "codes" && /^\s*[wcg]\d\d\s*$/i.test(query)) return score + 60;  // the code of a finding
    if (["errors", "changelog", "codes"].includes(docname)) return score - 30;
    if (docname === "interface") return score - 10;
    if (docname === "symptoms") return score + 12;
    if (docname.startsWith("handlers/") && docname !== "handlers/index") return score + 4;
    return score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
