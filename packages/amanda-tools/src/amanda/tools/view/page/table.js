// A table that sorts, of any length: the rows in sight are elements.

const LINE = 22;
const NARROW = 120;  // pixels of a column of words in a narrow window
const NARROW_PATH = 130;
const WIDE = 175;
const TOP = "(top level)";  // what is in the model itself, or in no module

class DataTable {
  // rows: how many.  columns: name, values by row, number, total, unit.  chosen: which rows a search leaves.
  // selected: the rows of what is selected.  pick: called with a row.
  constructor(element, { label, columns, rows, chosen, selected, pick, tell }) {
    Object.assign(this, { element, columns, size: rows, chosen, selected, pick, tell });
    this.sort = null;
    this.widths = columns.map((column, place) => this.width(column, place));
    this.head = h("div", { class: "line head", role: "row", "aria-rowindex": 1 }, columns.map((column, place) => this.header(column, place)));
    this.body = h("div", { class: "lines", role: "rowgroup" });
    this.foot = h("div", { class: "line foot", role: "row" });
    this.scroll = h("div", { class: "scroll grid", role: "grid", tabindex: 0, "aria-label": label, "aria-colcount": columns.length },
      this.head, this.body, this.foot);
    // Words give way to numbers, which are never cut: a table is as narrow as its words allow.
    const least = this.widths.map((width, place) => (columns[place].number ? width : Math.min(width, columns[place].path ? NARROW_PATH : NARROW)));
    this.scroll.style.setProperty("--width", `${least.reduce((sum, width) => sum + width, 0)}px`);
    const template = this.widths.map((width, place) => (
      columns[place].number ? `${width}px` : `minmax(${least[place]}px, ${columns[place].path ? "1fr" : `${width}px`})`)).join(" ");
    this.scroll.style.setProperty("--columns", template);
    this.draw = eachFrame(() => this.render());
    this.scroll.addEventListener("scroll", this.draw);
    this.scroll.addEventListener("keydown", (event) => this.key(event));
    this.head.addEventListener("keydown", (event) => this.headKey(event));
    this.body.addEventListener("click", (event) => {
      const line = event.target.closest(".line");
      if (line) this.pick(Number(line.dataset.row));
    });
    this.watch = new ResizeObserver(this.draw);
    element.replaceChildren(this.scroll);
    this.watch.observe(this.scroll);
    this.list();
    this.reveal();
  }

  remove() {
    this.watch.disconnect();
  }

  // Pixels of the widest text: of the name with the mark of the order, of values, and of the total.
  width(column, place) {
    const measure = (text, bold) => textWidth(text, bold ? "600 12px" : column.path || column.code ? "11px" : "12px", column.path || column.code);
    const step = Math.max(1, Math.floor(this.size / 400));
    const rows = Array.from({ length: this.size }, (_, row) => row);
    let widest = Math.max(measure(column.name, true) + 12, measure(this.total(column, place, rows), true));
    for (let row = 0; row < this.size; row += step) widest = Math.max(widest, measure(this.text(column, row), false));
    return Math.ceil(Math.min(widest, column.number ? Infinity : WIDE) + 17);
  }

  text(column, row) {
    const value = column.values[row];
    if (value === null && column.shared && column.shared[row]) return "″";
    if (value === "" && column.name === "module") return TOP;
    return column.plain ? String(value) : written(value, column);
  }

  total(column, place, rows) {
    if (!(column.total && column.number)) return place === 0 ? "total" : "";
    return written(rows.reduce((sum, row) => sum + (Number.isFinite(column.values[row]) ? column.values[row] : 0), 0), column);
  }

  header(column, place) {
    return h("div", { class: `cell${column.number ? " number" : ""}`, role: "columnheader", "aria-sort": "none", "aria-colindex": place + 1 },
      h("button", { type: "button", tabindex: place ? -1 : 0, title: column.from ? `${column.name}, from ${column.from}` : column.name, onclick: () => this.sortBy(place) },
        h("span", { class: "label" }, column.name), h("span", { class: "mark", "aria-hidden": "true" })));
  }

  // Numbers begin with the largest, words with the first; a third click restores the order of the file.
  sortBy(place) {
    const first = this.columns[place].number && !this.columns[place].plain ? -1 : 1;
    if (!this.sort || this.sort.place !== place) this.sort = { place, direction: first };
    else if (this.sort.direction === first) this.sort = { place, direction: -first };
    else this.sort = null;
    this.list();
    this.scroll.scrollTop = 0;
  }

  list() {
    const rows = [];
    for (let row = 0; row < this.size; row += 1) if (this.chosen(row)) rows.push(row);
    if (this.sort) {
      const { values, number } = this.columns[this.sort.place];
      const { direction } = this.sort;
      const absent = (value) => value === null || value === undefined || Number.isNaN(value);
      const compare = number ? (a, b) => a - b : (a, b) => collator.compare(written(a), written(b));
      rows.sort((a, b) => {
        const [x, y] = [values[a], values[b]];
        if (absent(x) || absent(y)) return absent(x) - absent(y) || a - b;
        return direction * compare(x, y) || a - b;
      });
    }
    this.rows = rows;
    this.at = null;
    [...this.head.children].forEach((cell, place) => cell.setAttribute("aria-sort",
      this.sort && this.sort.place === place ? (this.sort.direction > 0 ? "ascending" : "descending") : "none"));
    this.body.style.height = `${rows.length * LINE}px`;
    this.scroll.setAttribute("aria-rowcount", rows.length + 1);
    this.foot.replaceChildren(...this.columns.map((column, place) => h("div", { class: `cell${column.number ? " number" : ""}`, role: "gridcell" },
      this.total(column, place, rows))));
    this.foot.hidden = !rows.length || !this.columns.some((column) => column.total && column.number);
    this.tell(rows.length, this.size);
    this.draw();
  }

  render() {
    const { scroll } = this;
    const selected = this.selected();
    const first = Math.max(0, Math.floor(scroll.scrollTop / LINE) - 10);
    const last = Math.min(this.rows.length, Math.ceil((scroll.scrollTop + scroll.clientHeight) / LINE) + 10);
    const lines = [];
    for (let place = first; place < last; place += 1) lines.push(this.line(this.rows[place], place, selected));
    showRows(this.body, lines);
    const current = lines.find((line) => line.classList.contains("selected"));
    if (current) scroll.setAttribute("aria-activedescendant", current.id);
    else scroll.removeAttribute("aria-activedescendant");
  }

  line(row, place, selected) {
    const line = h("div", {
      class: `line${selected.has(row) ? " selected" : ""}${place % 2 ? " odd" : ""}`, role: "row", id: `line-${row}`,
      "data-row": row, "aria-rowindex": place + 2, "aria-selected": String(selected.has(row)) },
    this.columns.map((column) => {
      const text = this.text(column, row);
      const long = text.length > 16 || column.path;
      return h("div", { class: `cell${column.number ? " number" : ""}${column.path ? " path" : ""}${column.code ? " code" : ""}`, role: "gridcell", title: long ? text : null },
        column.path ? h("bdi", {}, text) : text);
    }));
    line.style.top = `${place * LINE}px`;
    return line;
  }

  placeOf(row) {
    if (!this.at) this.at = new Map(this.rows.map((one, place) => [one, place]));
    return this.at.get(row);
  }

  reveal() {
    const [row] = this.selected();
    const place = row === undefined ? undefined : this.placeOf(row);
    if (place !== undefined) {
      const { scroll } = this;
      const top = place * LINE;
      const room = scroll.clientHeight - LINE * (this.foot.hidden ? 2 : 3);
      if (top < scroll.scrollTop || top > scroll.scrollTop + room) scroll.scrollTop = Math.max(0, top - room / 2);
    }
    this.draw();
  }

  // The arrow keys lead from column to column; one of them is a stop of the Tab key.
  headKey(event) {
    const buttons = [...this.head.querySelectorAll("button")];
    const place = buttons.indexOf(event.target);
    const to = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: buttons.length - 1 }[event.key];
    if (place < 0 || to === undefined) return;
    buttons[place].tabIndex = -1;
    const next = buttons[clamp(to, 0, buttons.length - 1)];
    next.tabIndex = 0;
    next.focus();
    event.preventDefault();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(this.scroll.clientHeight / LINE) - 3);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || !this.rows.length || event.target !== this.scroll) return;
    const [row] = this.selected();
    const place = row === undefined ? undefined : this.placeOf(row);
    this.pick(this.rows[place === undefined ? 0 : clamp(place + moves[event.key], 0, this.rows.length - 1)]);
    event.preventDefault();
  }
}

const collator = new Intl.Collator("en", { numeric: true });
