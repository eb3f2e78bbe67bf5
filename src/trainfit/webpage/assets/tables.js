// Tables that can be sorted by any column, searched, and shown whole.

const FIRST_ROWS = 25;
const LONG_TEXT = 60; // characters, from which on a column needs room

function tablePart(part) {
  const { columns } = part;
  const count = columns.length ? columns[0].values.length : 0;
  const order = Array.from({ length: count }, (_, row) => row);
  let sorted = part.sorted === null || part.sorted === undefined ? null : { column: part.sorted, falling: true };
  let shown = FIRST_ROWS;
  let wanted = "";

  const body = element("tbody");
  const heads = columns.map((column, number) => {
    const sorter = button(column.name || "name", () => sortBy(number), { title: column.about });
    return element("th", { scope: "col", class: column.kind === "text" ? null : "tf-number" }, sorter);
  });
  const caption = element("p", { class: "tf-caption" }, part.caption);
  const table = element("table", { class: "tf-table", "aria-label": part.caption }, element("thead", {}, element("tr", {}, ...heads)), body);
  const more = button("", () => { shown = shown < count ? count : FIRST_ROWS; fill(); }, { class: "tf-more" });
  const search = element("input", { type: "search", placeholder: "Search", "aria-label": `Search: ${part.caption}` });
  search.addEventListener("input", () => { wanted = search.value.toLowerCase(); fill(); });

  function sortBy(number) {
    const falling = sorted && sorted.column === number ? !sorted.falling : columns[number].kind !== "text";
    sorted = { column: number, falling };
    const { values, kind } = columns[number];
    const sign = falling ? -1 : 1;
    order.sort((a, b) => {
      const one = values[a];
      const other = values[b];
      // What is not known comes last, whichever the direction.
      if (one === null || other === null) return one === other ? a - b : one === null ? 1 : -1;
      const difference = kind === "text" ? compareText(one, other) : one - other;
      return sign * difference || a - b;
    });
    fill();
  }

  function fill() {
    const matching = wanted ? order.filter((row) => columns.some((column) =>
      column.kind === "text" && String(column.values[row]).toLowerCase().includes(wanted))) : order;
    body.replaceChildren(...matching.slice(0, shown).map((row) => element("tr", {}, ...columns.map((column, number) =>
      cell(column, row, number === 0)))));
    heads.forEach((head, number) => {
      const is = sorted && sorted.column === number;
      head.setAttribute("aria-sort", is ? (sorted.falling ? "descending" : "ascending") : "none");
    });
    more.hidden = matching.length <= FIRST_ROWS;
    more.textContent = shown < count ? `Show all ${formatCount(matching.length)} rows` : "Show fewer rows";
  }

  fill();
  return element("div", { class: "tf-table-box", "data-table": part.name || null },
    caption, count > FIRST_ROWS ? search : null,
    element("div", { class: "tf-scroll", tabindex: "0", role: "region", "aria-label": part.caption }, table), more);
}

const compareText = (one, other) => one.localeCompare(other, "en", { numeric: true });

function cell(column, row, first) {
  const value = column.values[row];
  if (column.kind === "text") {
    const text = String(value === null ? "" : value);
    const style = text.length > LONG_TEXT ? "tf-long" : null;
    return first ? element("th", { scope: "row", class: style }, named(text, 240)) : element("td", { class: style }, named(text, 240));
  }
  const exact = column.kind === "bytes" && value !== null ? `${formatCount(value)} bytes` : null;
  return element("td", { class: "tf-number", title: exact }, value === null ? "–" : FORMATS[column.kind](value));
}
