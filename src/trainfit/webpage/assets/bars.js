// A few figures as bars beside each other.

function barsPart(part) {
  // A share of something is drawn as one: a full bar is all of it.
  const largest = Math.max(...part.rows.map((row) => row.value), part.unit === "share" ? 1 : 1e-12);
  const format = FORMATS[part.unit];
  const rows = part.rows.map((row) => {
    const bar = element("i", { class: `tf-b-${row.style}` });
    bar.style.width = `${(100 * row.value) / largest}%`;
    return element("tr", {}, element("th", { scope: "row" }, named(row.label, 60)), element("td", {}, element("span", { class: "tf-track" }, bar)), element("td", { class: "tf-number" }, format(row.value)));
  });
  return element("table", { class: "tf-bars" }, element("caption", {}, part.caption), element("tbody", {}, ...rows));
}
