// The tree of modules and ops: a list of the rows that are open, of which those in sight are elements.

const ROW = 24;

class Tree {
  constructor(model, element) {
    this.model = model;
    this.element = element;
    this.space = h("div", { class: "space-of-rows", role: "presentation" });
    element.append(this.space);
    this.draw = eachFrame(() => this.render());
    element.addEventListener("scroll", this.draw);
    element.addEventListener("keydown", (event) => this.key(event));
    element.addEventListener("click", (event) => this.click(event));
    element.addEventListener("dblclick", (event) => this.toggle(event));
    new ResizeObserver(this.draw).observe(element);
    model.on("folds search", () => this.list());
    model.on("measure", this.draw);
    model.on("selection", () => this.reveal());
    this.list();
  }

  list() {
    const { model } = this;
    this.rows = [];
    const visit = (node) => {
      node.children.forEach((child, place) => {
        if (model.matches && !child.found) return;
        child.place = place + 1;
        this.rows.push(child);
        if (model.isOpen(child)) visit(child);
      });
    };
    visit(model.root);
    this.at = new Map(this.rows.map((node, row) => [node, row]));
    this.space.style.height = `${this.rows.length * ROW}px`;
    this.draw();
  }

  render() {
    const { model, element } = this;
    const first = Math.max(0, Math.floor(element.scrollTop / ROW) - 8);
    const last = Math.min(this.rows.length, Math.ceil((element.scrollTop + element.clientHeight) / ROW) + 8);
    const shown = [];
    for (let row = first; row < last; row += 1) shown.push(this.row(this.rows[row], row));
    showRows(this.space, shown);
    const current = this.at.get(model.selection);
    if (current === undefined) element.removeAttribute("aria-activedescendant");
    else element.setAttribute("aria-activedescendant", `tree-${model.selection.id}`);
  }

  row(node, row) {
    const { model } = this;
    const share = model.share(node);
    const inner = !node.isOp;
    const bar = h("span", { class: "bar-of-share" });
    bar.style.width = `${(100 * Math.min(1, Math.abs(share))).toFixed(1)}%`;
    const phase = node.isOp ? model.ops.phase[node.op] : "";
    const made = h("div", {
      class: `row ${inner ? "module" : "op"}${node === model.selection ? " selected" : ""}`,
      role: "treeitem", id: `tree-${node.id}`, "data-id": node.id,
      "aria-level": node.depth, "aria-posinset": node.place, "aria-setsize": node.parent.children.length,
      "aria-expanded": inner ? String(model.isOpen(node)) : null, "aria-selected": String(node === model.selection),
      title: inner ? node.path ?? node.name : `${model.called(node.op)} · ${model.ops.source[node.op]}`,
    },
    inner ? h("span", { class: `chevron${model.isOpen(node) ? " open" : ""}`, "aria-hidden": "true" })
      : h("span", { class: `dot ${kindClass(model.kinds[node.op])}${phase === "forward" ? "" : " hollow"}`, "aria-hidden": "true" }),
    inner ? h("span", { class: "name" }, node.name) : this.opName(node.op),
    node.flagged ? h("span", { class: "flag", role: "img", "aria-label": inner ? `${node.flagged} flagged` : model.flags.get(node.op), title: inner ? `${node.flagged} flagged` : model.flags.get(node.op) }, "!") : null,
    inner ? h("span", { class: "count" }, grouped(model.matches ? node.found : node.count)) : null,
    h("span", { class: "space" }),
    model.measure.values ? h("span", { class: `value${model.sum(node) ? "" : " soft"}` }, bar, h("span", {}, this.value(node))) : null);
    made.style.top = `${row * ROW}px`;
    made.style.paddingLeft = `${6 + (node.depth - 1) * 13}px`;
    return made;
  }

  // A long name loses its end, never its number.
  opName(op) {
    const { model } = this;
    const number = model.numbers.get(op);
    if (!number) return h("span", { class: "name" }, model.label(op));
    return h("span", { class: "name numbered" }, h("span", {}, model.label(op)), h("span", { class: "number" }, ` ${number}`));
  }

  value(node) {
    const { measure } = this.model;
    if (node.isOp && measure.values[node.op] === null) return measure.shared && measure.shared[node.op] ? "″" : "";
    return written(this.model.sum(node), measure);
  }

  nodeAt(event) {
    const row = event.target.closest(".row");
    return row ? this.model.nodes[Number(row.dataset.id)] : null;
  }

  click(event) {
    const node = this.nodeAt(event);
    if (!node) return;
    if (event.target.classList.contains("chevron")) this.model.fold(node);
    else this.model.select(node);
  }

  toggle(event) {
    const node = this.nodeAt(event);
    if (node && !event.target.classList.contains("chevron")) this.model.fold(node);
  }

  key(event) {
    const { model } = this;
    const row = this.at.get(model.selection);
    const node = row === undefined ? null : this.rows[row];
    const page = Math.max(1, Math.floor(this.element.clientHeight / ROW) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key in moves) this.go(row === undefined ? 0 : row + moves[event.key]);
    else if (event.key === "ArrowRight" && node) {
      if (!node.isOp && !model.isOpen(node)) model.fold(node, true);
      else if (!node.isOp) this.go(row + 1);
    } else if (event.key === "ArrowLeft" && node) {
      if (!node.isOp && model.isOpen(node)) model.fold(node, false);
      else if (node.parent !== model.root) model.select(node.parent);
    } else if ((event.key === "Enter" || event.key === " ") && node) model.fold(node);
    else return;
    event.preventDefault();
  }

  go(row) {
    if (this.rows.length) this.model.select(this.rows[clamp(row, 0, this.rows.length - 1)]);
  }

  reveal() {
    const row = this.at.get(this.model.selection);
    if (row !== undefined) {
      const top = row * ROW;
      const { scrollTop, clientHeight } = this.element;
      if (top < scrollTop) this.element.scrollTop = top - ROW;
      else if (top + ROW > scrollTop + clientHeight) this.element.scrollTop = top - clientHeight + 2 * ROW;
    }
    this.draw();
  }
}
