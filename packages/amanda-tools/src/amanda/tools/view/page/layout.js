// Where the nodes of the graph lie. Each module that is unfolded is laid out by itself, with one place at its top
// where tensors enter and one at its bottom where they leave; so a change in one lays out only those around it.

const MOST_DRAWN = 1200;
const FEW = 40;
const FAR = 30;
const PAD = 12;
const HEAD = 24;

class Layout {
  constructor(model, width) {
    this.model = model;
    this.width = width;  // of a text: (text, bold) => pixels
    this.boxes = new Map();
    this.touched = new Map();
  }

  // mode: a phase, or null for all.  Gives the box of the root, and how many modules stay folded for want of room.
  run(mode) {
    if (mode !== this.mode) {
      this.boxes.clear();
      this.touched.clear();
      this.mode = mode;
    }
    const skipped = this.choose();
    return { box: this.box(this.model.root, mode), skipped };
  }

  phaseOf(op) {
    return this.model.ops.phase[op];
  }

  countIn(node, phase) {
    return phase === null ? node.count : node.byPhase.get(phase) || 0;
  }

  // A module that holds one op is drawn as this op.
  drawn(node, phase) {
    if (node.isOp || this.countIn(node, phase) !== 1) return node;
    let one = node;
    while (!one.isOp) one = one.children.find((child) => this.countIn(child, phase));
    return one;
  }

  isOpen(node, phase) {
    return !this.drawn(node, phase).isOp && this.opened.has(node);
  }

  // The unfolded modules, outermost first, as long as there is room; those around the selection in any case.
  choose() {
    const { model } = this;
    const needed = new Set();
    for (let node = model.selection && model.selection.parent; node; node = node.parent) needed.add(node);
    this.opened = new Set([model.root]);
    let drawn = model.root.children.length;
    let skipped = 0;
    let level = [model.root];
    while (level.length) {
      const next = [];
      for (const child of level.flatMap((node) => node.children)) {
        if (child.isOp || !model.unfolded.has(child) || !this.countIn(child, this.mode)) continue;
        if (drawn + child.children.length > MOST_DRAWN && !needed.has(child)) {
          skipped += 1;
          continue;
        }
        drawn += child.children.length;
        this.opened.add(child);
        next.push(child);
      }
      level = next;
    }
    return skipped;
  }

  key(node, phase) {
    return `${node.id}:${phase}`;
  }

  // What distinguishes the present layout of a module: which modules in it are unfolded.
  signature(node, phase) {
    if (!this.isOpen(node, phase) && node !== this.model.root) return "";
    return `(${node.children.filter((child) => !child.isOp && this.opened.has(child))
      .map((child) => child.id + this.signature(child, phase)).join()})`;
  }

  box(node, phase) {
    const key = this.key(node, phase);
    const signature = this.signature(node, phase);
    const known = this.boxes.get(key);
    if (known && known.signature === signature) return known;
    const made = this.arrange(node, phase);
    made.signature = signature;
    this.boxes.set(key, made);
    return made;
  }

  // ---- edges ----

  holds(node, phase, op) {
    if (op < 0) return false;
    const { id } = this.model.nodeOf[op];
    return id >= node.id && id < node.last && (phase === null || this.phaseOf(op) === phase);
  }

  // Edges, as triples, of which one end at least is in a module; between phases at the outermost level alone.
  touching(node, phase) {
    const key = this.key(node, phase);
    if (this.touched.has(key)) return this.touched.get(key);
    const root = node === this.model.root;
    const of = root ? this.model.edges : this.touching(node.parent, node.parent === this.model.root ? this.mode : phase);
    const found = [];
    for (let i = 0; i < of.length; i += 3) {
      const [from, to] = [of[i], of[i + 1]];
      const kept = root
        ? this.mode === null || (this.phaseOf(to) === this.mode && (from < 0 || this.phaseOf(from) === this.mode))
        : this.holds(node, phase, from) ? this.phaseOf(to) === phase : this.holds(node, phase, to) && (from < 0 || this.phaseOf(from) === phase);
      if (kept) found.push(from, to, of[i + 2]);
    }
    this.touched.set(key, found);
    return found;
  }

  childKey(node, op) {
    let child = this.model.nodeOf[op];
    while (child.parent !== node) child = child.parent;
    return this.key(child, this.phaseOf(op));
  }

  // Edges between what a module holds directly, "in" and "out", with the tensors that go along.
  level(node, phase) {
    const edges = new Map();
    const inputs = new Set();
    const all = this.touching(node, phase);
    const root = node === this.model.root;
    for (let i = 0; i < all.length; i += 3) {
      const [from, to, tensor] = [all[i], all[i + 1], all[i + 2]];
      const starts = this.holds(node, phase, from) ? this.childKey(node, from) : root ? `t${tensor}` : "in";
      const ends = this.holds(node, phase, to) ? this.childKey(node, to) : "out";
      if (starts === ends) continue;
      if (root && from < 0) inputs.add(tensor);
      const key = `${starts}>${ends}`;
      if (!edges.has(key)) edges.set(key, { from: starts, to: ends, tensors: new Set() });
      edges.get(key).tensors.add(tensor);
    }
    return { edges: [...edges.values()], inputs };
  }

  // ---- places ----

  arrange(node, phase) {
    const { model } = this;
    const items = new Map();
    const { edges, inputs } = this.level(node, phase);
    for (const child of node.children) {
      for (const one of phase === null ? child.byPhase.keys() : [phase]) {
        if (this.countIn(child, one)) items.set(this.key(child, one), this.item(child, one));
      }
    }
    for (const tensor of inputs) items.set(`t${tensor}`, this.input(tensor));
    this.setApart(edges, items);
    const graph = new dagre.graphlib.Graph({ multigraph: true });
    graph.setGraph({ rankdir: "TB", nodesep: 16, edgesep: 10, ranksep: 30, ranker: items.size > 60 ? "tight-tree" : "network-simplex" });
    for (const [key, item] of items) graph.setNode(key, { width: item.w, height: item.h });
    const ports = new Set(edges.flatMap((edge) => [edge.from, edge.to]).filter((end) => end === "in" || end === "out"));
    for (const port of ports) graph.setNode(port, { width: 8, height: 1 });
    this.holdPorts(graph, ports, edges, items);
    edges.forEach((edge, number) => {
      if (edge.far) return;
      edge.label = edge.tensors.size === 1 ? shape(model.tensors.shape[[...edge.tensors][0]]) : `${edge.tensors.size} tensors`;
      edge.name = String(number);
      const width = edge.from === "in" || edge.to === "out" ? 0 : this.width(edge.label) * 0.85 + 8;
      graph.setEdge(edge.from, edge.to, { width, height: width ? 12 : 0, labelpos: "c" }, edge.name);
    });
    dagre.layout(graph);
    return this.boxOf(graph, items, edges, ports);
  }

  // Nothing lies above the way in, nothing below the way out.
  holdPorts(graph, ports, edges, items) {
    const light = { weight: 0.01, width: 0, height: 0 };
    for (const [port, far] of [["in", "to"], ["out", "from"]]) {
      if (!ports.has(port)) continue;
      const reached = new Set(edges.filter((edge) => !edge.far).map((edge) => edge[far]));
      for (const key of items.keys()) {
        if (reached.has(key)) continue;
        if (port === "in") graph.setEdge("in", key, { ...light }, "held");
        else graph.setEdge(key, "out", { ...light }, "held");
      }
    }
  }

  boxOf(graph, items, edges, ports) {
    for (const [key, item] of items) {
      const { x, y } = graph.node(key);
      item.x = x - item.w / 2;
      item.y = y - item.h / 2;
    }
    const bounds = graph.graph();
    const box = { w: Number.isFinite(bounds.width) ? bounds.width : 0, h: Number.isFinite(bounds.height) ? bounds.height : 0, items, edges };
    for (const port of ports) box[port] = graph.node(port).x;
    for (const edge of edges.filter((one) => one.far)) this.bow(edge, box, items);
    for (const edge of edges.filter((one) => !one.far)) {
      const { points, x, y } = graph.edge(edge.from, edge.to, edge.name);
      edge.points = points.map((point) => ({ x: point.x, y: point.y }));
      edge.at = { x, y };
      this.dock(edge.points, 0, items.get(edge.from), "out");
      this.dock(edge.points, edge.points.length - 1, items.get(edge.to), "in");
      if (edge.from === "in") edge.points.unshift({ x: box.in, y: -HEAD });
      if (edge.to === "out") edge.points.push({ x: box.out, y: box.h + PAD });
    }
    return box;
  }

  // In a large box the layout takes long for edges across many nodes: those are drawn beside it.
  setApart(edges, items) {
    if (items.size <= FEW) return;
    const place = new Map([...items.keys()].map((key, order) => [key, order]));
    place.set("in", -1).set("out", items.size);
    for (const edge of edges) {
      edge.far = !edge.from.startsWith("t") && Math.abs(place.get(edge.to) - place.get(edge.from)) > FAR;
    }
  }

  // From the right side of one node to that of another.
  bow(edge, box, items) {
    const [start, end] = [edge.from, edge.to].map((key) => {
      if (key === "in") return { x: box.in, y: -HEAD };
      if (key === "out") return { x: box.out, y: box.h + PAD };
      const item = items.get(key);
      return { x: item.x + item.w, y: item.y + item.h / 2 };
    });
    const out = Math.max(start.x, end.x) + Math.min(60, 10 + Math.abs(end.y - start.y) / 40);
    edge.points = [start, { x: out, y: start.y }, { x: out, y: end.y }, end];
    edge.at = {};
  }

  // An edge to an unfolded module ends where the edges within it begin.
  dock(points, end, item, port) {
    if (!item || !item.box || item.box[port] === undefined) return;
    const border = port === "in" ? item.y : item.y + item.h;
    if (Math.abs(points[end].y - border) < 1) points[end].x = item.x + PAD + item.box[port];
  }

  item(child, phase) {
    const { model } = this;
    const node = this.drawn(child, phase);
    if (node.isOp) {
      const title = beginning(model.label(node.op), 30);
      const sub = ending(node.parent.path === null || node.parent === model.root ? "" : node.parent.name, 30);
      const own = sub && this.countIn(node.parent, phase) === 1 ? sub : "";
      return { node, phase, title, sub: own, w: Math.max(this.width(title, true), this.width(own)) + 26, h: own ? 36 : 25 };
    }
    if (this.isOpen(child, phase)) {
      const box = this.box(child, phase);
      const title = child.name;
      const least = this.width(title, true) + 60;
      const item = { node, phase, title, box, w: Math.max(box.w + 2 * PAD, least), h: box.h + HEAD + PAD };
      return item;
    }
    const title = beginning(child.name, 30);
    const sub = plural(this.countIn(child, phase), "op");
    return { node, phase, title, sub, folded: true, w: Math.max(this.width(title, true), this.width(sub)) + 44, h: 38 };
  }

  input(tensor) {
    const { tensors } = this.model;
    const title = beginning(tensors.name[tensor] || "input", 30);
    const sub = `${shape(tensors.shape[tensor])} ${tensors.dtype[tensor] || ""}`.trim();
    return { tensor, title, sub, w: Math.max(this.width(title, true), this.width(sub)) + 26, h: 36 };
  }
}
