// All that is known of what is selected; of the page itself where nothing is.

class Details {
  constructor(model, element) {
    this.model = model;
    this.element = element;
    model.on("selection measure", () => this.show());
    this.show();
  }

  show() {
    const { selection } = this.model;
    const parts = selection ? (selection.isOp ? this.op(selection.op) : this.module(selection)) : this.overview();
    const focused = this.element.contains(document.activeElement);
    this.element.replaceChildren(...parts.flat().filter(Boolean));
    if (focused) this.element.focus();
    this.element.scrollTop = 0;
  }

  list(pairs) {
    return h("dl", {}, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([name, value, code]) => [h("dt", {}, name), h("dd", { class: code ? "code" : null }, value)]));
  }

  link(op) {
    const { model } = this;
    return h("button", { type: "button", class: "link", onclick: () => model.selectOp(op), title: `${model.ops.module[op]}\n${model.ops.source[op]}` },
      h("span", { class: `dot ${kindClass(model.kinds[op])}${model.ops.phase[op] === "forward" ? "" : " hollow"}` }), model.called(op),
      h("span", { class: "soft" }, ` ${ending(model.ops.module[op], 22)}`));
  }

  // Some of many, and how many more there are.
  some(ops, most = 12) {
    const shown = ops.slice(0, most).map((op) => h("li", {}, this.link(op)));
    if (ops.length > most) shown.push(h("li", { class: "soft" }, `and ${grouped(ops.length - most)} more`));
    return h("ul", { class: "links" }, shown);
  }

  // ---- an op ----

  op(op) {
    const { model } = this;
    const { ops } = model;
    const at = (name) => (ops[name] ? ops[name][op] : null);
    const forward = at("forward");
    const backwards = model.backwards.get(op) || [];
    return [
      h("h3", {}, h("span", { class: `dot ${kindClass(model.kinds[op])}${ops.phase[op] === "forward" ? "" : " hollow"}` }), model.called(op)),
      model.flags.has(op) ? h("p", { class: "flagged" }, h("span", { class: "flag" }, "!"), ` ${model.flags.get(op)}`) : null,
      this.list([["phase", ops.phase[op]], ["name", at("name") === ops.type[op] ? "" : at("name"), true], ["module", this.modules(op)],
        ["source", ops.source[op], true], ["op", model.content.graph ? String(op) : ""], ["id", at("id"), true],
        ["calls", written(at("calls"))], ["in place", at("in_place") ? "yes" : ""]]),
      this.measured(op),
      this.attributes(at("attributes")),
      model.tensors ? this.side("Inputs", at("inputs"), "producer") : null,
      model.tensors ? this.side("Outputs", at("outputs"), "consumers") : null,
      model.tensors && (at("writes") || []).length ? this.side("Writes", at("writes"), "consumers") : null,
      forward !== null && forward !== undefined ? [h("h4", {}, "Forward op"), this.some([forward])] : null,
      backwards.length ? [h("h4", {}, "Backward ops"), this.some(backwards)] : null,
      this.rowsElsewhere(op),
    ].flat();
  }

  modules(op) {
    const nodes = [];
    for (let node = this.model.nodeOf[op].parent; node && node !== this.model.root; node = node.parent) if (node.path !== null) nodes.unshift(node);
    if (!nodes.length) return h("span", { class: "soft" }, "outside modules");
    return h("span", {}, nodes.map((node, place) => [place ? h("span", { class: "soft" }, " › ") : null,
      h("button", { type: "button", class: "link inline", onclick: () => this.model.select(node) }, node.name)]));
  }

  measured(op) {
    const pairs = this.model.columns.filter((column) => column.table)
      .map((column) => [column.name, column.values[op] === null && column.shared[op] ? "with another op of this line" : written(column.values[op], column)]);
    return pairs.some(([, value]) => value) ? [h("h4", {}, "Measured"), this.list(pairs)] : null;
  }

  attributes(given) {
    const pairs = Object.entries(given || {}).map(([name, value]) => [name, beginning(typeof value === "string" ? value : JSON.stringify(value), 200), true]);
    return pairs.length ? [h("h4", {}, "Attributes"), this.list(pairs)] : null;
  }

  side(title, given, far) {
    const flat = (given || []).flatMap((one, place) => (Array.isArray(one) ? one.map((inner) => [place, inner]) : [[place, one]]))
      .filter(([, tensor]) => tensor !== null && tensor !== undefined);
    if (!flat.length) return null;
    return [h("h4", {}, title), h("ol", { class: "tensors" }, flat.slice(0, 40).map(([place, tensor]) => this.tensor(place, tensor, far))),
      flat.length > 40 ? h("p", { class: "soft" }, `and ${flat.length - 40} more`) : null].flat();
  }

  tensor(place, index, far) {
    const { tensors } = this.model;
    const ends = far === "producer" ? [tensors.producer[index]].filter((op) => op !== null && op !== undefined) : tensors.consumers[index] || [];
    return h("li", {},
      h("span", { class: "place" }, String(place)), h("span", { class: "code" }, shape(tensors.shape[index])), " ",
      h("span", { class: "soft" }, [tensors.dtype[index], tensors.kind[index] === "activation" ? "" : tensors.kind[index],
        Number.isInteger(tensors.alias_of[index]) ? "shares memory" : "",
        tensors.bytes[index] === null ? "" : amount(tensors.bytes[index], "B")].filter(Boolean).join(" · ")),
      tensors.name[index] ? h("div", { class: "code" }, tensors.name[index]) : null,
      ends.length ? this.some(ends, 6) : null);
  }

  // Rows of tables that tell more than one thing of an op.
  rowsElsewhere(op) {
    return this.model.tables.filter((table) => table.ops && !table.joined).flatMap((table) => {
      const rows = table.rows.filter((_, row) => table.ops[row].includes(op)).slice(0, 20);
      if (!rows.length) return [];
      const columns = table.columns.map((column, place) => [column, place]).filter(([column]) => !KEYS.includes(column.name) && column.name !== "id");
      return [h("h4", {}, table.title), ...rows.map((row) => this.list(columns.map(([column, place]) => [column.name, written(row[place], column)])))];
    });
  }

  // ---- a module ----

  module(node) {
    const { model } = this;
    const ops = node.ops();
    const phases = [...node.byPhase].map(([phase, count]) => `${grouped(count)} ${phase}`).join(", ");
    const only = node.path ? h("button", { type: "button", onclick: () => {
      const query = $("query");
      query.value = `module:${node.path}*`;
      query.dispatchEvent(new Event("input"));
    } }, "Only this module") : null;
    return [h("h3", {}, node.name), this.list([["path", node.path, true], ["ops", phases]]),
      h("p", { class: "actions" }, h("button", { type: "button", onclick: () => model.fold(node) }, "Fold or unfold"), only),
      this.totals(ops), this.types(ops)].flat();
  }

  totals(ops) {
    const columns = this.model.columns.filter((column) => column.total && column.number);
    const sum = (column) => ops.reduce((total, op) => total + (Number.isFinite(column.values[op]) ? column.values[op] : 0), 0);
    return columns.length ? [h("h4", {}, "Totals"), this.list(columns.map((column) => [column.name, written(sum(column), column)]))] : null;
  }

  types(ops) {
    const { model } = this;
    const values = model.measure.values;
    const types = new Map();
    for (const op of ops) {
      const entry = types.get(model.label(op)) || { count: 0, sum: 0, kind: model.kinds[op] };
      entry.count += 1;
      entry.sum += model.measured(op);
      types.set(model.label(op), entry);
    }
    const sorted = [...types].sort((a, b) => b[1].sum - a[1].sum || b[1].count - a[1].count).slice(0, 30);
    const most = sorted.length ? sorted[0][1].sum || 1 : 1;
    return [h("h4", {}, values ? `Types by ${model.measure.name}` : "Types"), h("ul", { class: "types" }, sorted.map(([type, { count, sum, kind }]) => {
      const bar = h("span", { class: "bar-of-share" });
      bar.style.width = `${Math.max(0, (100 * sum) / most).toFixed(1)}%`;
      return h("li", {}, h("span", { class: `dot ${kindClass(kind)}` }),
        h("button", { type: "button", class: "link inline name", title: `Search for ${type}`, onclick: () => {
          $("query").value = `type:${type}`;
          $("query").dispatchEvent(new Event("input"));
        } }, type), h("span", { class: "soft" }, `×${grouped(count)}`),
        values ? h("span", { class: "value" }, bar, h("span", {}, written(sum, model.measure))) : null);
    }))];
  }

  // ---- the page ----

  overview() {
    const { model } = this;
    const { content } = model;
    const ops = Array.from({ length: model.size }, (_, op) => op);
    const phases = [...model.root.byPhase].map(([phase, count]) => `${grouped(count)} ${phase}`).join(", ");
    return [h("h3", {}, content.title),
      this.list([["ops", phases], ["modules", model.size ? grouped(model.modules.size - 1) : ""],
        ["tensors", model.tensors ? grouped(model.tensors.shape.length) : ""], ...content.facts]),
      model.size ? [this.totals(ops), this.types(ops)].flat() : [],
      h("h4", {}, "Files"), h("ul", { class: "files" }, content.sources.map((source) => h("li", {}, source.name, h("span", { class: "soft" }, ` ${source.schema} ${source.version}`)))),
      content.notes.map((note) => h("p", { class: "remark" }, note)),
      h("h4", {}, "Keys"), this.list([["/", "search"], ["Enter", "next op found"], ["Esc", "nothing selected"], ["↑ ↓ ← →", "in the tree, the table and the diff; they move the graph"],
        ["← →", "from column to column in the head of a table; Enter sorts"], ["Enter", "folds in the tree and the graph"],
        ["+ − 0", "zoom, all, in the graph and the diff"]])].flat();
  }
}
