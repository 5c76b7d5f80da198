// What the page shows: ops, the modules that hold them, columns joined to ops, search, selection, folds.

const MOST_CHILDREN = 120;  // more are put into groups, which fold
const FIRST_ROWS = 18;  // of as many nodes a graph can be read when all of it is in sight
const KEYS = ["phase", "type", "module", "source"];

class Node {
  constructor(parent, name, path, op = -1) {
    this.parent = parent;
    this.name = name;
    this.path = path;  // of a module; null for an op and for a group
    this.op = op;      // -1 for a module or group
    this.depth = parent ? parent.depth + 1 : 0;
    this.children = [];
    this.count = 0;
    this.byPhase = new Map();
    this.found = 0;
    this.flagged = 0;
    this.id = 0;
    this.first = Infinity;
  }

  get isOp() { return this.op >= 0; }

  ops() {
    return this.isOp ? [this.op] : this.children.flatMap((child) => child.ops());
  }
}

class Model {
  constructor(content) {
    this.content = content;
    this.ops = content.ops;
    this.size = content.ops.type.length;
    this.tensors = content.graph ? content.graph.tensors : null;
    this.edges = content.graph ? content.graph.edges : [];
    this.phases = [...new Set(this.ops.phase)];
    this.kinds = this.ops.type.map(kindOf);
    this.listeners = new Map();
    this.selection = null;  // a node
    this.terms = [];
    this.matches = null;    // per op, or null without a search
    this.unfolded = new Set();
    this.unfoldedFound = new Set();
    this.numberNamesakes();
    this.makeTree();
    this.makeColumns();
    this.makeNeighbours();
    this.flag();
    [this.measure] = this.measures;
    this.addUp();
    this.unfoldFirst();
  }

  on(events, listener) {
    for (const event of events.split(" ")) {
      if (!this.listeners.has(event)) this.listeners.set(event, []);
      this.listeners.get(event).push(listener);
    }
  }

  tell(event) {
    for (const listener of this.listeners.get(event) || []) listener();
  }

  // ---- modules ----

  makeTree() {
    this.root = new Node(null, "", "");
    const modules = new Map([["", this.root]]);
    const module = (path, mark) => {
      if (modules.has(path)) return modules.get(path);
      const cut = path.lastIndexOf(mark);
      const parent = module(cut < 0 ? "" : path.slice(0, cut), mark);
      const made = new Node(parent, path.slice(cut + 1), path);
      modules.set(path, made);
      parent.children.push(made);
      return made;
    };
    this.nodeOf = new Array(this.size);
    for (let op = 0; op < this.size; op += 1) {
      const path = this.ops.module[op];
      const parent = module(path, path.includes("/") ? "/" : ".");
      const made = new Node(parent, this.ops.type[op], null, op);
      this.nodeOf[op] = made;
      parent.children.push(made);
      for (let node = made; node; node = node.parent) node.first = Math.min(node.first, op);
    }
    this.modules = modules;
    for (const node of modules.values()) {
      node.children.sort((a, b) => a.first - b.first);
      this.group(node);
    }
    this.number(this.root);
  }

  // Too many children are grouped: first the ops between modules, then all.
  group(node) {
    if (node.children.length <= MOST_CHILDREN) return;
    const runs = [];
    for (const child of node.children) {
      const run = runs[runs.length - 1];
      if (run && run[0].isOp && child.isOp) run.push(child);
      else runs.push([child]);
    }
    if (runs.length < node.children.length / 2 && runs.length > 1) {
      node.children = runs.flatMap((run) => (run.length < 8 ? run : [this.holder(node, plural(run.length, "op"), run)]));
      for (const child of node.children) if (child.path === null && !child.isOp) this.cut(child);
    }
    this.cut(node);
  }

  holder(node, name, held) {
    const made = new Node(node, name, null);
    made.children = held;
    made.first = held[0].first;
    for (const child of held) child.parent = made;
    return made;
  }

  cut(node) {
    const all = node.children.length;
    if (all <= MOST_CHILDREN) return;
    const each = Math.max(40, Math.ceil(all / 100));
    const groups = [];
    for (let start = 0; start < all; start += each) {
      const held = node.children.slice(start, start + each);
      groups.push(this.holder(node, `${start + 1}–${start + held.length} of ${all}`, held));
    }
    node.children = groups;
  }

  number(root) {
    this.nodes = [];
    const visit = (node) => {
      node.id = this.nodes.length;
      node.depth = node.parent ? node.parent.depth + 1 : 0;
      this.nodes.push(node);
      if (node.isOp) {
        node.count = 1;
        node.byPhase.set(this.ops.phase[node.op], 1);
      }
      for (const child of node.children) {
        visit(child);
        node.count += child.count;
        for (const [phase, count] of child.byPhase) node.byPhase.set(phase, (node.byPhase.get(phase) || 0) + count);
      }
      node.last = this.nodes.length;  // ids of what it holds: from its own up to this one
    };
    visit(root);
  }

  // Modules that hold a third of the ops, such as a stack of layers, as long as the tree is short.
  unfoldFirst() {
    this.unfolded.add(this.root);
    const isModule = (child) => !child.isOp && child.path !== null;
    const folded = this.root.children.filter(isModule);
    let rows = this.root.children.length;
    while (folded.length) {
      const largest = folded.reduce((a, b) => (b.count > a.count ? b : a));
      rows += largest.children.length;
      if (rows > FIRST_ROWS || largest.count < this.root.count / 3) return;
      this.unfolded.add(largest);
      folded.splice(folded.indexOf(largest), 1, ...largest.children.filter(isModule));
    }
  }

  isOpen(node) {
    return (this.matches ? this.unfoldedFound : this.unfolded).has(node);
  }

  fold(node, open = !this.isOpen(node)) {
    if (node.isOp || node === this.root) return;
    for (const folds of this.matches ? [this.unfoldedFound, this.unfolded] : [this.unfolded]) {
      if (open) folds.add(node);
      else folds.delete(node);
    }
    this.tell("folds");
  }

  foldAll(open) {
    const folds = this.matches ? this.unfoldedFound : this.unfolded;
    folds.clear();
    folds.add(this.root);
    if (open) for (const node of this.nodes) if (!node.isOp) folds.add(node);
    if (!open) this.selection = null;
    if (!this.matches && !open) this.unfoldFirst();
    this.tell("folds");
    if (!open) this.tell("selection");
  }

  // ---- selection ----

  select(node) {
    if (node === this.selection) return;
    this.selection = node;
    let opened = false;
    for (let one = node && node.parent; one; one = one.parent) {
      for (const folds of [this.unfolded, this.unfoldedFound]) {
        if (!folds.has(one)) {
          folds.add(one);
          opened = true;
        }
      }
    }
    if (opened) this.tell("folds");
    this.tell("selection");
  }

  selectOp(op) {
    this.select(op < 0 ? null : this.nodeOf[op]);
  }

  get selectedOp() {
    return this.selection && this.selection.isOp ? this.selection.op : -1;
  }

  // ---- columns ----

  // Columns of an op: its own, then those of tables that have at most one row for each op.
  makeColumns() {
    const { ops } = this;
    const own = (name, values, more = {}) => ({ name, values, number: false, total: false, unit: "", ...more });
    this.columns = [];
    if (this.content.graph) this.columns.push(own("op", ops.type.map((_, op) => op), { number: true, plain: true }));
    this.columns.push(own("phase", ops.phase), own("type", ops.type), own("module", ops.module, { path: true }));
    const calls = this.content.graph && ops.calls ? own("calls", ops.calls, { number: true, total: true }) : null;
    if (calls) this.columns.push(calls);
    this.tables = this.content.tables.map((table) => ({ ...table, joined: this.join(table) }));
    if (this.content.graph && ops.outputs) this.columns.push(own("output", ops.outputs.map((given) => this.firstShape(given)), { code: true }));
    this.columns.push(own("source", ops.source, { path: true }));
  }

  // What is to be looked at: ops that diverge between runs, and those that make NaN or Inf.
  flag() {
    this.flags = new Map();
    for (const table of this.tables) {
      const verdict = table.columns.findIndex((column) => column.name === "verdict");
      const first = Object.values(table.first || {});
      const differs = (place) => (first.includes(place) ? "the first to differ between the runs" : "differs between the runs");
      const told = { "amanda.nan": () => "makes NaN or Inf", "amanda.diff": (row, place) => (row[verdict] === "different" ? differs(place) : null) }[table.schema];
      if (!told || !table.ops) continue;
      table.rows.forEach((row, place) => {
        const what = told(row, place);
        if (what) for (const op of table.ops[place]) if (!this.flags.has(op)) this.flags.set(op, what);
      });
    }
    for (const op of this.flags.keys()) for (let node = this.nodeOf[op]; node; node = node.parent) node.flagged += 1;
  }

  firstShape(given) {
    const index = (given || []).flat().find((one) => one !== null && one !== undefined);
    return index === undefined ? "" : shape(this.tensors.shape[index]);
  }

  join(table) {
    if (!table.ops) return false;
    const rows = new Array(this.size).fill(-1);
    for (const [row, about] of table.ops.entries()) {
      for (const op of about) {
        if (rows[op] >= 0) return false;
        rows[op] = row;
      }
    }
    table.rowOf = rows;
    const shared = new Uint8Array(this.size);  // told with another op that stands for both
    for (const about of table.ops) about.slice(1).forEach((op) => { shared[op] = 1; });
    table.columns.forEach((column, place) => {
      if (KEYS.includes(column.name) || column.name === "id") return;
      const values = rows.map((row, op) => (row < 0 || shared[op] ? null : this.value(table.rows[row][place], column)));
      const twin = this.columns.find((one) => one.name === column.name);
      if (twin && (column.name === "calls" || twin.values.every((value, op) => value === values[op]))) return;
      const name = twin ? `${column.name} · ${table.name.replace(/\.json(\.gz)?$/, "")}` : column.name;
      this.columns.push({ ...column, name, values, shared, table, large: isLarge(values, column) });
      if (twin && twin.table && twin.table.schema === table.schema && column.number) {
        const change = values.map((value, op) => (value === null && twin.values[op] === null ? null : (value || 0) - (twin.values[op] || 0)));
        this.columns.push({ ...column, name: `Δ ${column.name}`, values: change, shared, table, large: isLarge(values, column) });
      }
    });
    return true;
  }

  value(value, column) {
    return column.number && typeof value === "string" ? Number(value) : value;
  }

  get measures() {
    const count = { name: "ops", values: null, number: true, total: true, unit: "" };
    const totals = this.columns.filter((column) => column.total && column.number && column.name !== "calls");
    const order = (column) => (column.unit in SECONDS ? 0 : /flops/i.test(column.name) ? 1 : 2);
    return [...totals.sort((a, b) => order(a) - order(b)), count];
  }

  setMeasure(name) {
    this.measure = this.measures.find((column) => column.name === name) || this.measure;
    this.addUp();
    this.tell("measure");
  }

  // The measure of each node: of an op, or of all that a module holds.
  addUp() {
    this.sums = new Float64Array(this.nodes.length);
    for (let id = this.nodes.length - 1; id >= 0; id -= 1) {
      const node = this.nodes[id];
      if (node.isOp) this.sums[id] = this.measured(node.op);
      if (node.parent) this.sums[node.parent.id] += this.sums[id];
    }
  }

  measured(op) {
    return this.measure.values ? this.measure.values[op] || 0 : 1;
  }

  sum(node) {
    return this.sums[node.id];
  }

  share(node) {
    return this.sums[0] ? this.sum(node) / this.sums[0] : 0;
  }

  // ---- neighbours ----

  makeNeighbours() {
    this.backwards = new Map();
    (this.ops.forward || []).forEach((forward, op) => {
      if (forward === null || forward === undefined) return;
      if (!this.backwards.has(forward)) this.backwards.set(forward, []);
      this.backwards.get(forward).push(op);
    });
  }

  label(op) {
    return this.ops.type[op] || this.ops.name[op] || "op";
  }

  // Its label, with a number where a module does several ops of this label in one phase.
  called(op) {
    const number = this.numbers.get(op);
    return number ? `${this.label(op)} ${number}` : this.label(op);
  }

  numberNamesakes() {
    this.numbers = new Map();
    this.natives = new Map();  // the framework's names of namesakes that are different ops
    const namesakes = new Map();
    for (let op = 0; op < this.size; op += 1) {
      const key = [this.ops.phase[op], this.ops.module[op], this.label(op)].join("\n");
      if (!namesakes.has(key)) namesakes.set(key, []);
      namesakes.get(key).push(op);
    }
    for (const ops of namesakes.values()) {
      if (ops.length < 2) continue;
      const differ = ops.some((op) => this.ops.name[op] !== this.ops.name[ops[0]]);
      ops.forEach((op, place) => {
        this.numbers.set(op, place + 1);
        if (differ) this.natives.set(op, this.ops.name[op]);
      });
    }
  }

  // ---- search ----

  search(text) {
    this.terms = text.toLowerCase().split(/\s+/).filter(Boolean);
    if (!this.terms.length) {
      this.matches = null;
    } else {
      const tests = this.terms.map((term) => this.test(term));
      this.matches = Uint8Array.from({ length: this.size }, (_, op) => (tests.every((test) => test(op)) ? 1 : 0));
    }
    this.countFound();
    this.tell("search");
  }

  test(term) {
    const { ops } = this;
    const [, field, word] = /^(type|name|module|source|phase|id|has):(.+)$/.exec(term) || [null, "", term];
    const match = wildcard(word);
    if (field === "has") {
      const tables = this.tables.filter((table) => table.ops && match(table.schema.replace("amanda.", "")));
      const having = new Set(tables.flatMap((table) => table.ops.flat()));
      return (op) => having.has(op);
    }
    if (field) return (op) => match(String((ops[field] || [])[op] ?? "").toLowerCase());
    const fields = [ops.type, ops.name, ops.module, ops.source, ops.phase];
    return (op) => fields.some((values) => match((values[op] || "").toLowerCase()));
  }

  countFound() {
    for (const node of this.nodes) node.found = 0;
    this.found = [];
    this.unfoldedFound = new Set([this.root]);
    if (!this.matches) return;
    for (let op = 0; op < this.size; op += 1) {
      if (!this.matches[op]) continue;
      this.found.push(op);
      for (let node = this.nodeOf[op]; node; node = node.parent) node.found += 1;
    }
    const few = this.found.length <= 300;
    for (const node of this.nodes) if (!node.isOp && node.found && (few || node.depth < 2)) this.unfoldedFound.add(node);
  }

  nextFound(step) {
    if (!this.found || !this.found.length) return;
    const current = this.found.indexOf(this.selectedOp);
    const next = current < 0 ? (step > 0 ? 0 : this.found.length - 1) : (current + step + this.found.length) % this.found.length;
    this.selectOp(this.found[next]);
  }
}

// Whether a column's numbers are written with prefixes, all of them, so that they compare at a glance.
function isLarge(values, column) {
  if (!column.number) return false;
  const sum = values.reduce((all, value) => (column.total ? all + (value || 0) : Math.max(all, Math.abs(value) || 0)), 0);
  return sum >= 1e6;
}

// A word is found anywhere; with a star in it, as a whole.
function wildcard(word) {
  if (!word.includes("*")) return (text) => text.includes(word);
  const pattern = new RegExp(`^${word.split("*").map((part) => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&")).join(".*")}$`);
  return (text) => pattern.test(text);
}
