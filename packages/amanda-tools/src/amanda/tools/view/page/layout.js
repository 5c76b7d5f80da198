// Where the nodes of the graph lie. Each module that is unfolded is laid out by itself, with one place at its top
// where tensors enter and one at its bottom where they leave; so a change in one lays out only those around it.

const MOST_DRAWN = 1200;
const MOST_CROSSED = 600;
const ROW_OF_ALONE = 4;
const MOST_CALLS = 64;
const PAD = 12;
const HEAD = 24;

// What a module does in one phase; of a module that is called again with what came of it, each call apart.
class Part {
  constructor(node, phase, parent, ops) {
    this.node = node;
    this.phase = phase;  // null for all
    this.parent = parent;
    this.ops = ops;      // ascending
    this.from = ops.length ? ops[0] : 0;
    this.to = ops.length ? ops[ops.length - 1] : -1;
    this.key = `${node.id}:${phase}:${this.from}`;
  }
}

class Layout {
  constructor(model, width) {
    this.model = model;
    this.width = width;  // of a text: (text, bold) => pixels
    this.roots = new Map();
  }

  // mode: a phase, or null for all.  Gives the box of the root, and how many modules stay folded for want of room.
  run(mode) {
    const { model } = this;
    this.mode = mode;
    if (!this.roots.has(mode)) {
      const all = Array.from({ length: model.size }, (_, op) => op);
      this.roots.set(mode, new Part(model.root, mode, null, all.filter((op) => mode === null || this.phaseOf(op) === mode)));
    }
    this.root = this.roots.get(mode);
    const skipped = this.choose();
    return { box: this.box(this.root), skipped };
  }

  phaseOf(op) {
    return this.model.ops.phase[op];
  }

  // ---- parts ----

  parts(part) {
    if (!part.children) {
      const groups = new Map();
      for (const op of part.ops) {
        const child = this.childOf(part.node, op);
        const key = `${child.id}:${this.phaseOf(op)}`;
        if (!groups.has(key)) groups.set(key, { child, phase: this.phaseOf(op), ops: [] });
        groups.get(key).ops.push(op);
      }
      part.children = new Map();
      const order = [...groups.values()];
      for (const { child, phase, ops } of order) {
        const calls = child.isOp || child.path === null || ops.length < 2 ? [ops] : this.calls(part, child, phase, ops);
        part.children.set(`${child.id}:${phase}`, calls.map((one) => new Part(child, phase, part, one)));
      }
    }
    part.all ??= [...part.children.values()].flat();
    return part.all;
  }

  childOf(node, op) {
    let child = this.model.nodeOf[op];
    while (child.parent !== node) child = child.parent;
    return child;
  }

  partOf(part, op) {
    this.parts(part);
    const calls = part.children.get(`${this.childOf(part.node, op).id}:${this.phaseOf(op)}`);
    return calls.find((one) => op >= one.from && op <= one.to);
  }

  // The ops of a module by its calls: a call begins where an op needs what others made of an earlier call.
  calls(part, child, phase, ops) {
    const runs = [];
    let place = -2;
    const at = new Map(part.ops.map((op, order) => [op, order]));
    for (const op of ops) {
      if (at.get(op) === place + 1) runs[runs.length - 1].push(op);
      else runs.push([op]);
      place = at.get(op);
    }
    if (runs.length === 1 || runs.length > MOST_CALLS) return [ops];
    const next = this.successors(part);
    const own = new Set(ops);
    const calls = [];
    let reached = new Set();
    for (const run of runs) {
      if (!calls.length || run.some((op) => reached.has(op))) {
        calls.push([...run]);
        reached = new Set();
      } else calls[calls.length - 1].push(...run);
      // What others compute of this call.
      const ahead = run.flatMap((op) => next.get(op) || []).filter((op) => !own.has(op));
      while (ahead.length) {
        const op = ahead.pop();
        if (reached.has(op)) continue;
        reached.add(op);
        if (!own.has(op)) ahead.push(...next.get(op) || []);
      }
    }
    return calls;
  }

  // From each op of a part to those of the same phase in it that read what it made.
  successors(part) {
    if (!part.next) {
      part.next = new Map();
      const edges = this.touching(part);
      for (let i = 0; i < edges.length; i += 3) {
        const [from, to] = [edges[i], edges[i + 1]];
        if (!this.holds(part, from) || !this.holds(part, to) || this.phaseOf(from) !== this.phaseOf(to)) continue;
        if (!part.next.has(from)) part.next.set(from, []);
        part.next.get(from).push(to);
      }
    }
    return part.next;
  }

  isOpen(part) {
    return part === this.root || (part.ops.length > 1 && this.opened.has(part.node));
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
        if (child.isOp || !model.unfolded.has(child) || (this.mode !== null && !child.byPhase.get(this.mode))) continue;
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

  // What distinguishes the present layout of a part: which modules in it are unfolded.
  signature(node) {
    return node.children.filter((child) => !child.isOp && this.opened.has(child))
      .map((child) => `${child.id}(${this.signature(child)})`).join();
  }

  box(part) {
    const signature = this.signature(part.node);
    if (!part.box || part.box.signature !== signature) {
      part.box = this.arrange(part);
      part.box.signature = signature;
    }
    return part.box;
  }

  // ---- edges ----

  holds(part, op) {
    if (op < part.from || op > part.to) return false;
    const { id } = this.model.nodeOf[op];
    return id >= part.node.id && id < part.node.last && (part.phase === null || this.phaseOf(op) === part.phase);
  }

  // Edges, as triples, of which one end at least is in a part; between phases at the outermost level alone.
  touching(part) {
    if (part.edges) return part.edges;
    const { phase } = part;
    const of = part.parent ? this.touching(part.parent) : this.model.edges;
    part.edges = [];
    for (let i = 0; i < of.length; i += 3) {
      const [from, to] = [of[i], of[i + 1]];
      const same = phase === null || (this.phaseOf(to) === phase && (from < 0 || this.phaseOf(from) === phase));
      if (same && (this.holds(part, from) || this.holds(part, to))) part.edges.push(from, to, of[i + 2]);
    }
    return part.edges;
  }

  // Edges between what a part holds directly, "in" and "out", with the tensors that go along.
  level(part) {
    const edges = new Map();
    const inputs = new Set();
    const all = this.touching(part);
    const root = part === this.root;
    for (let i = 0; i < all.length; i += 3) {
      const [from, to, tensor] = [all[i], all[i + 1], all[i + 2]];
      const starts = this.holds(part, from) ? this.partOf(part, from).key : root ? `t${tensor}` : "in";
      const ends = this.holds(part, to) ? this.partOf(part, to).key : "out";
      if (starts === ends) continue;
      if (root && from < 0) inputs.add(tensor);
      const key = `${starts}>${ends}`;
      if (!edges.has(key)) edges.set(key, { from: starts, to: ends, tensors: new Set() });
      edges.get(key).tensors.add(tensor);
    }
    return { edges: [...edges.values()], inputs };
  }

  // ---- places ----

  arrange(part) {
    const { model } = this;
    const items = new Map();
    const { edges, inputs } = this.level(part);
    for (const child of this.parts(part)) items.set(child.key, this.item(child));
    for (const tensor of inputs) items.set(`t${tensor}`, this.input(tensor));
    this.setApart(edges, items);
    const graph = new dagre.graphlib.Graph({ multigraph: true });
    graph.setGraph({ rankdir: "TB", nodesep: 16, edgesep: 10, ranksep: 30, ranker: items.size > 60 ? "tight-tree" : "network-simplex" });
    const linked = new Set(edges.filter((edge) => !edge.far).flatMap((edge) => [edge.from, edge.to]));
    const alone = [...items].filter(([key]) => !linked.has(key));
    if (alone.length > ROW_OF_ALONE) for (const [, item] of alone) item.alone = true;
    for (const [key, item] of items) if (!item.alone) graph.setNode(key, { width: item.w, height: item.h });
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
      for (const [key, item] of items) {
        if (reached.has(key) || item.alone) continue;
        if (port === "in") graph.setEdge("in", key, { ...light }, "held");
        else graph.setEdge(key, "out", { ...light }, "held");
      }
    }
  }

  boxOf(graph, items, edges, ports) {
    for (const [key, item] of items) {
      if (item.alone) continue;
      const { x, y } = graph.node(key);
      item.x = x - item.w / 2;
      item.y = y - item.h / 2;
    }
    const bounds = graph.graph();
    const box = { w: Number.isFinite(bounds.width) ? bounds.width : 0, h: Number.isFinite(bounds.height) ? bounds.height : 0, items, edges };
    this.putInRows([...items.values()].filter((item) => item.alone), box);
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

  // What has no edges lies below the rest, in rows.
  putInRows(items, box) {
    const wide = Math.max(box.w, Math.min(900, Math.sqrt(items.length) * 160));
    let [x, y, tall] = [0, box.h ? box.h + 24 : 0, 0];
    for (const item of items) {
      if (x > 0 && x + item.w > wide) [x, y, tall] = [0, y + tall + 14, 0];
      [item.x, item.y] = [x, y];
      x += item.w + 16;
      tall = Math.max(tall, item.h);
      box.w = Math.max(box.w, x - 16);
      box.h = y + tall;
    }
  }

  // Edges across many nodes take the layout long: beyond what it does at once the longest are drawn beside it.
  setApart(edges, items) {
    const place = new Map([...items.keys()].map((key, order) => [key, order]));
    place.set("in", -1).set("out", items.size);
    for (const key of items.keys()) {  // an input is right before the first that reads it
      if (!key.startsWith("t")) continue;
      place.set(key, Math.min(...edges.filter((edge) => edge.from === key).map((edge) => place.get(edge.to))) - 1);
    }
    const span = (edge) => Math.abs(place.get(edge.to) - place.get(edge.from));
    let crossed = 0;
    for (const edge of [...edges].sort((a, b) => span(a) - span(b))) {
      crossed += span(edge);
      edge.far = crossed > MOST_CROSSED && span(edge) > 1;
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

  item(part) {
    const { model } = this;
    const { node, phase, ops } = part;
    if (ops.length === 1) {  // a module that does one op is drawn as this op
      const own = model.nodeOf[ops[0]];
      const title = beginning(model.called(ops[0]), 30);
      const sub = node.isOp ? beginning(model.natives.get(ops[0]) || "", 30) : ending(own.parent.name, 30);
      return { part, node: own, phase, title, sub, w: Math.max(this.width(title, true), this.width(sub)) + 26, h: sub ? 36 : 25 };
    }
    if (this.isOpen(part)) {
      const box = this.box(part);
      const least = this.width(node.name, true) + 60;
      return { part, node, phase, title: node.name, box, w: Math.max(box.w + 2 * PAD, least), h: box.h + HEAD + PAD };
    }
    const title = beginning(node.name, 30);
    const sub = plural(ops.length, "op");
    return { part, node, phase, title, sub, folded: true, w: Math.max(this.width(title, true), this.width(sub)) + 44, h: 38 };
  }

  input(tensor) {
    const { tensors } = this.model;
    const title = beginning(tensors.name[tensor] || "input", 30);
    const sub = `${shape(tensors.shape[tensor])} ${tensors.dtype[tensor] || ""}`.trim();
    return { tensor, title, sub, w: Math.max(this.width(title, true), this.width(sub)) + 26, h: 36 };
  }
}
