// The graph of what is unfolded, drawn by `Layout`'s places; it is dragged, zoomed and folded.

const NEAR = 200;  // pixels around the graph's part of the page

class Graph {
  constructor(model, element, tools) {
    this.model = model;
    this.element = element;
    this.tools = tools;
    this.title = "Graph";
    this.mode = model.phases.includes("forward") ? "forward" : model.phases[0] ?? null;
    this.layout = new Layout(model, (text, bold) => textWidth(text, bold ? "600 12px" : "11px", false));
    this.view = { x: 0, y: 0, scale: 1 };
    this.drawings = new WeakMap();  // by the box that they draw
    model.on("folds", () => this.refold());
    model.on("selection", () => this.onSelection());
    model.on("search", () => { if (this.shown) this.mark(); });
    model.on("measure", () => { if (this.shown) this.heat(); });
  }

  show() {
    this.shown = true;
    this.makeTools();
    this.scene = svg("g", {});
    this.svg = svg("svg", { class: "graph", tabindex: 0, role: "group", "aria-label": "Graph of what is unfolded" },
      svg("defs", {}, ["arrow", "arrow-hot"].map((id) => svg("marker", {
        id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 6, markerHeight: 6, orient: "auto-start-reverse" },
      svg("path", { d: "M0 1 L7 4 L0 7 z" })))), this.scene);
    this.note = h("p", { class: "note", "aria-live": "polite" });
    this.legend = h("ul", { class: "legend", "aria-label": "Colours" });
    this.element.replaceChildren(this.svg, this.note, this.legend);
    this.listen();
    new ResizeObserver(() => { if (this.fitted) this.fit(); }).observe(this.svg);
    this.render();
    if (this.placed) this.move();
    else this.fit();
    this.placed = true;
    this.bringSelection();
  }

  hide() {
    this.shown = false;
    this.element.replaceChildren();
    this.tools.replaceChildren();
  }

  makeTools() {
    const button = (text, title, action) => h("button", { type: "button", title, "aria-label": title, onclick: action }, text);
    const modes = this.model.phases.length > 1 ? [...this.model.phases, null] : [];
    this.choices = modes.map((mode) => h("button", {
      type: "button", class: "choice", "aria-pressed": String(mode === this.mode), "data-mode": mode ?? "all",
      onclick: () => this.setMode(mode) }, mode ?? "both"));
    this.tools.replaceChildren(
      this.choices.length ? h("span", { class: "choices", role: "group", "aria-label": "Phase" }, this.choices) : "",
      button("−", "Zoom out", () => this.zoom(1 / 1.3)), button("+", "Zoom in", () => this.zoom(1.3)),
      button("Fit", "Fit: show the whole graph", () => this.fit()));
  }

  setMode(mode) {
    this.mode = mode;
    for (const choice of this.choices || []) choice.setAttribute("aria-pressed", String(choice.dataset.mode === (mode ?? "all")));
    if (!this.shown) return;
    this.render();
    this.fit();
  }

  // ---- drawing ----

  render() {
    const { box, skipped } = this.layout.run(this.mode);
    this.box = box;
    if (!this.drawings.has(box)) {
      Object.assign(this, { places: new Map(), byNode: new Map(), lines: [], texts: [], kindsSeen: new Set(), stagesSeen: new Set() });
      const layers = [svg("g", {}), svg("g", {}), svg("g", {})];
      this.drawBox(box, 0, 0, layers);
      const { places, byNode, lines, texts, kindsSeen, stagesSeen } = this;
      this.drawings.set(box, { layers, places, byNode, lines, texts, kindsSeen, stagesSeen });
    }
    Object.assign(this, this.drawings.get(box));
    this.scene.replaceChildren(...this.layers);
    this.note.textContent = skipped ? `${plural(skipped, "unfolded module")} drawn folded: there is room for ${grouped(MOST_DRAWN)} nodes` : "";
    this.svg.setAttribute("data-nodes", this.places.size);
    const kinds = KINDS.map(([kind]) => kind).concat("other").filter((kind) => this.kindsSeen.has(kind));
    const stages = [...this.stagesSeen].sort((a, b) => a - b);
    const colours = stages.length ? stages.map((stage) => [`stage ${stage}`, stageClass(stage)]) : kinds.map((kind) => [kind, kindClass(kind)]);
    this.legend.replaceChildren(...colours.map(([name, colour]) => h("li", {}, h("span", { class: `dot ${colour}` }), name)));
    this.heat();
    this.mark();
  }

  drawBox(box, left, top, layers) {
    const [clusters, edges, nodes] = layers;
    for (const [key, item] of box.items) {
      const [x, y] = [left + item.x, top + item.y];
      const element = item.box ? this.cluster(item, x, y) : this.node(item, x, y);
      (item.box ? clusters : nodes).append(element);
      const place = { key, item, x, y, element };
      this.places.set(key, place);
      this.texts.push({ element, x, y, w: item.w, h: item.box ? HEAD : item.h, off: false });
      if (item.node) {
        for (const node of new Set([item.node, item.part.node])) {
          if (!this.byNode.has(node)) this.byNode.set(node, []);
          this.byNode.get(node).push(place);
        }
      }
      if (item.box) this.drawBox(item.box, x + PAD + (item.w - 2 * PAD - item.box.w) / 2, y + HEAD, layers);
    }
    for (const edge of box.edges) {
      const path = svg("path", { class: `edge${edge.far ? " far-edge" : ""}${edge.to === "out" ? "" : " ends"}`, d: curve(edge.points, left, top) });
      edges.append(path);
      let label = null;
      if (edge.label && edge.from !== "in" && edge.to !== "out" && edge.at.x !== undefined) {
        label = svg("text", { class: "edge-label", x: left + edge.at.x, y: top + edge.at.y + 4 }, edge.label);
        edges.append(label);
        this.texts.push({ element: label, x: left + edge.at.x, y: top + edge.at.y, w: 0, h: 0, off: false });
      }
      this.lines.push({ edge, path, label, hot: false });
    }
  }

  node(item, x, y) {
    const { model } = this;
    const kind = item.node ? (item.node.isOp ? model.kinds[item.node.op] : "module") : "input";
    if (item.node && item.node.isOp) this.kindsSeen.add(kind);
    const stage = this.stageOf(item);
    if (stage !== null) this.stagesSeen.add(stage);
    const colour = stage === null ? kindClass(kind) : `staged ${stageClass(stage)}`;
    const middle = x + item.w / 2 + (item.folded ? 6 : 0);
    const group = svg("g", {
      class: `node ${colour}${item.phase && item.phase !== "forward" ? " later" : ""}${this.flagged(item)}`,
      "data-id": item.node ? item.node.id : null, role: "img",
      "aria-label": `${item.title} ${item.sub || ""}`.trim() },
    svg("title", {}, this.tip(item)),
    svg("rect", { x, y, width: item.w, height: item.h, rx: item.node ? 4 : item.h / 2 }),
    item.folded ? svg("path", { class: "open", "data-fold": "1", d: `M${x + 8} ${y + item.h / 2 - 4} l5 4 l-5 4 z` }) : null,
    svg("text", { class: "title", x: middle, y: y + (item.sub ? 15 : 17) }, item.title),
    item.sub ? svg("text", { class: "sub", x: middle, y: y + 28 }, item.sub) : null);
    if (item.node) group.append(svg("rect", { class: "heat", x: x + 1, y: y + item.h - 3, width: 0, height: 2, "data-w": item.w - 2 }));
    return group;
  }

  flagged(item) {
    return item.part && item.part.ops.some((op) => this.model.flags.has(op)) ? " flagged" : "";
  }

  // The stage of an op, or of all ops of a folded module; null where they are in several.
  stageOf(item) {
    const { stages } = this.model.content;
    const found = item.node ? new Set((item.node.isOp ? [item.node.op] : item.part.ops).map((op) => stages[op] ?? null)) : [];
    return found.size === 1 ? [...found][0] : null;
  }

  cluster(item, x, y) {
    return svg("g", { class: `cluster${this.flagged(item)}`, "data-id": item.node.id, role: "group", "aria-label": `${item.title}, unfolded` },
      svg("title", {}, this.tip(item)),
      svg("rect", { x, y, width: item.w, height: item.h, rx: 6 }),
      svg("rect", { class: "grip", "data-fold": "1", x, y, width: 22, height: HEAD - 2 }),
      svg("path", { class: "open", d: `M${x + 8} ${y + 8} l8 0 l-4 5 z` }),
      svg("text", { class: "title", x: x + 22, y: y + 15 }, ending(item.title, 40)));
  }

  tip(item) {
    if (!item.node) return `${item.title}\n${item.sub}`;
    const { model } = this;
    if (item.node.isOp) return `${model.called(item.node.op)} (${item.phase})\n${model.ops.module[item.node.op]}\n${model.ops.source[item.node.op]}`;
    return `${item.node.path ?? item.node.name} (${item.phase})\n${plural(item.part.ops.length, "op")}`;
  }

  // The share of the measure at each node.
  heat() {
    const { model } = this;
    const total = (ops) => ops.reduce((sum, op) => sum + model.measured(op), 0);
    const nodes = [...this.places.values()].filter(({ item }) => item.node && !item.box);
    const shares = nodes.map((place) => [place.element.lastChild, total(place.item.part.ops)]);
    const most = Math.max(...shares.map(([, sum]) => sum), 0);
    for (const [heat, sum] of shares) heat.setAttribute("width", most && model.measure.values ? (Number(heat.dataset.w) * sum / most).toFixed(1) : 0);
  }

  // What the selection and the search change about the elements that are there.
  mark() {
    const { model } = this;
    const selected = new Set(this.placesOf(model.selection).map((place) => place.key));
    for (const place of this.places.values()) {
      const { node } = place.item;
      place.element.classList.toggle("selected", selected.has(place.key));
      place.element.classList.toggle("dim", Boolean(model.matches && node && !node.found));
      place.element.classList.toggle("found", Boolean(model.matches && node && node.found && !place.item.box));
    }
    for (const line of this.lines) {
      const hot = selected.has(line.edge.from) || selected.has(line.edge.to);
      if (hot === line.hot) continue;
      line.hot = hot;
      line.path.classList.toggle("hot", hot);
      if (line.label) line.label.classList.toggle("hot", hot);
    }
  }

  // Where a node is drawn: in several places where a module is called several times; or else what holds it.
  placesOf(node) {
    for (let one = node; one && one !== this.model.root; one = one.parent) {
      const found = this.byNode.get(one);
      if (found) return found;
    }
    return [];
  }

  // ---- folding and selecting ----

  refold() {
    if (!this.shown) return;
    const [anchor] = this.placesOf(this.anchor);
    const before = anchor ? { x: anchor.x, y: anchor.y } : null;
    this.render();
    const [after] = this.placesOf(this.anchor);
    if (before && after) {
      this.view.x += (before.x - after.x) * this.view.scale;
      this.view.y += (before.y - after.y) * this.view.scale;
      this.move();
    } else if (this.visible()) this.move();
    else this.fit();
    this.anchor = null;
  }

  onSelection() {
    const { selection } = this.model;
    if (selection && selection.isOp && this.mode !== null && this.model.ops.phase[selection.op] !== this.mode) {
      this.setMode(this.model.ops.phase[selection.op]);
    }
    if (!this.shown) return;
    this.mark();
    if (!this.still) this.bringSelection();
  }

  bringSelection() {
    const [place] = this.placesOf(this.model.selection);
    if (place) this.bring(place);
  }

  // Something of the graph is in sight.
  visible() {
    const { width, height } = this.svg.getBoundingClientRect();
    const { x, y, scale } = this.view;
    return x < width && y < height && x + this.box.w * scale > 0 && y + this.box.h * scale > 0;
  }

  bring(place) {
    const { width, height } = this.svg.getBoundingClientRect();
    const { view } = this;
    if (view.scale < 0.35) view.scale = 0.8;
    const x = (place.x + place.item.w / 2) * view.scale + view.x;
    const top = place.y * view.scale + view.y;
    const y = place.item.box ? top + 40 : top + (place.item.h / 2) * view.scale;
    if (x < 60 || x > width - 60) view.x += width / 2 - x;
    if (y < 40 || y > height - 50) view.y += (place.item.box ? 60 : height / 2) - y;
    this.move();
  }

  // ---- moving ----

  listen() {
    let drag = null;
    const nodeAt = (event) => {
      const element = event.target.closest("[data-id]");
      return element ? this.model.nodes[Number(element.dataset.id)] : null;
    };
    this.svg.addEventListener("wheel", (event) => {
      event.preventDefault();
      const { left, top } = this.svg.getBoundingClientRect();
      this.zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015)), event.clientX - left, event.clientY - top);
    }, { passive: false });
    this.svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      drag = { x: event.clientX, y: event.clientY, moved: false };
    });
    this.svg.addEventListener("pointermove", (event) => {
      if (!drag) return;
      const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
      if (!drag.moved && Math.hypot(dx, dy) < 4) return;
      if (!drag.moved) this.svg.setPointerCapture(event.pointerId);
      this.view.x += dx;
      this.view.y += dy;
      drag = { x: event.clientX, y: event.clientY, moved: true };
      this.move();
    });
    const drop = () => { this.dragged = Boolean(drag && drag.moved); drag = null; };
    this.svg.addEventListener("pointerup", drop);
    this.svg.addEventListener("pointercancel", drop);
    this.svg.addEventListener("click", (event) => {
      if (this.dragged) return;
      const node = nodeAt(event);
      if (node && event.target.dataset.fold) this.toggle(node);
      else this.selectHere(node);
    });
    this.svg.addEventListener("dblclick", (event) => {
      const node = nodeAt(event);
      if (node && !event.target.dataset.fold) this.toggle(node);
    });
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  // What is clicked stays under the pointer.
  selectHere(node) {
    this.still = true;
    this.model.select(node);
    this.still = false;
  }

  toggle(node) {
    if (node.isOp) return;
    this.anchor = node;
    const drawnOpen = this.layout.opened.has(node);
    this.model.fold(node, !drawnOpen);
  }

  key(event) {
    const moves = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) {
      this.view.x += moves[event.key][0];
      this.view.y += moves[event.key][1];
      this.move();
    } else if (event.key === "+" || event.key === "=") this.zoom(1.3);
    else if (event.key === "-") this.zoom(1 / 1.3);
    else if (event.key === "0") this.fit();
    else if (event.key === "Enter" && this.model.selection) this.toggle(this.model.selection);
    else return;
    event.preventDefault();
  }

  zoom(factor, x = null, y = null) {
    const { width, height } = this.svg.getBoundingClientRect();
    const [cx, cy] = [x ?? width / 2, y ?? height / 2];
    const scale = clamp(this.view.scale * factor, 0.02, 4);
    const real = scale / this.view.scale;
    this.view = { scale, x: cx - (cx - this.view.x) * real, y: cy - (cy - this.view.y) * real };
    this.move();
  }

  // All of it, also after the window has another size, until the user moves it.
  fit() {
    const { width, height } = this.svg.getBoundingClientRect();
    const { w, h: tall } = this.box;
    const scale = clamp(Math.min((width - 32) / Math.max(w, 1), (height - 32) / Math.max(tall, 1)), 0.02, 1);
    this.view = { scale, x: (width - w * scale) / 2, y: Math.max(16, (height - tall * scale) / 2) };
    this.move();
    this.fitted = true;
  }

  // Texts are laid out at each step of a zoom: those far from what is in sight are left out.
  move() {
    this.fitted = false;
    const { width, height } = this.svg.getBoundingClientRect();
    const { x, y, scale } = this.view;
    this.scene.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)}) scale(${scale.toFixed(4)})`);
    this.scene.classList.toggle("far", scale < 0.4);
    this.scene.classList.toggle("tiny", scale < 0.2);
    for (const text of this.texts) {
      const left = text.x * scale + x;
      const top = text.y * scale + y;
      const off = left > width + NEAR || top > height + NEAR || left + text.w * scale < -NEAR || top + text.h * scale < -NEAR;
      if (off === text.off) continue;
      text.off = off;
      text.element.classList.toggle("off", off);
    }
  }
}

// Through the points, with corners rounded.
function curve(points, left, top) {
  const at = (point) => `${(left + point.x).toFixed(1)} ${(top + point.y).toFixed(1)}`;
  let path = `M${at(points[0])}`;
  for (let i = 1; i < points.length - 1; i += 1) {
    const next = points[i + 1];
    const middle = i === points.length - 2 ? next : { x: (points[i].x + next.x) / 2, y: (points[i].y + next.y) / 2 };
    path += `Q${at(points[i])} ${at(middle)}`;
  }
  return points.length === 2 ? `${path}L${at(points[1])}` : path;
}
