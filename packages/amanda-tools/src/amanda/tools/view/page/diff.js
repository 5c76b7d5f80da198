// How the error between two runs grows: a point for each op in the order of execution, by its relative error.

const FLOOR = -17;   // of the axis, a power of ten; below it lie those that are equal
const EDGE = { left: 56, right: 16, top: 28, bottom: 26 };

class DiffView {
  constructor(model, table, element, tools) {
    Object.assign(this, { model, table, element, tools });
    this.title = "Diff";
    const column = (name) => {
      const place = table.columns.findIndex((one) => one.name === name);
      return table.rows.map((row) => (place < 0 ? null : row[place]));
    };
    this.errors = column("relative error").map((value) => (value === null ? null : Number(value)));
    this.tolerances = column("tolerance").map((value) => (value === null ? null : Number(value)));
    this.verdicts = column("verdict");
    this.phases = column("phase");
    this.names = column("type").map((type, row) => [type, column("module")[row]]);
    this.low = FLOOR;
    this.top = this.errors.reduce((top, error) => (Number.isFinite(error) && error > 0 ? Math.max(top, Math.ceil(Math.log10(error))) : top), 1);
    this.from = 0;
    this.to = Math.max(1, this.errors.length);
    this.current = -1;
    this.draw = eachFrame(() => this.render());
    model.on("selection", () => this.follow());
    model.on("search", () => { if (this.shown) this.draw(); });
  }

  show() {
    this.shown = true;
    this.canvas = h("canvas", { class: "timeline diff", tabindex: 0, role: "img" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.said = h("div", { class: "verdict" }, this.firsts());
    this.element.replaceChildren(this.said, h("div", { class: "plot" }, this.canvas, this.tip));
    const button = (text, title, action) => h("button", { type: "button", title, "aria-label": title, onclick: action }, text);
    this.tools.replaceChildren(button("−", "Zoom out", () => this.zoom(1.6)), button("+", "Zoom in", () => this.zoom(1 / 1.6)),
      button("Fit", "Fit: show all ops", () => this.look(0, this.errors.length)));
    this.listen();
    this.watch = new ResizeObserver(this.draw);
    this.watch.observe(this.element);
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.dark.addEventListener("change", this.draw);
    this.follow();
    this.render();
  }

  hide() {
    this.shown = false;
    this.watch.disconnect();
    this.dark.removeEventListener("change", this.draw);
    this.element.replaceChildren();
    this.tools.replaceChildren();
  }

  // The first divergence of each pass, as links.
  firsts() {
    const found = Object.entries(this.table.first || {}).filter(([, row]) => Number.isInteger(row) && row < this.names.length);
    if (!found.length) return [h("span", {}, "No op diverges")];
    return found.map(([phase, row]) => h("span", {}, h("span", { class: "soft" }, `First divergence, ${phase}: `),
      h("button", { type: "button", class: "link inline", onclick: () => this.pick(row) }, this.name(row)),
      ` relative error ${written(this.errors[row])}`));
  }

  name(row) {
    const [type, module] = this.names[row];
    return module ? `${type} in ${module}` : String(type);
  }

  look(from, to) {
    const all = Math.max(1, this.errors.length);
    const span = clamp(to - from, Math.min(4, all), all);
    this.from = clamp(from, 0, all - span);
    this.to = this.from + span;
    this.draw();
  }

  zoom(factor, x = this.canvas.clientWidth / 2) {
    const part = clamp((x - EDGE.left) / Math.max(1, this.canvas.clientWidth - EDGE.left - EDGE.right), 0, 1);
    const at = this.from + part * (this.to - this.from);
    const span = (this.to - this.from) * factor;
    this.look(at - part * span, at + (1 - part) * span);
  }

  follow() {
    const op = this.model.selectedOp;
    const about = (row) => this.table.ops && this.table.ops[row].includes(op);
    if (this.current < 0 || !about(this.current)) this.current = op < 0 ? -1 : this.errors.findIndex((_, row) => about(row));
    if (this.shown && this.current >= 0 && (this.current < this.from || this.current >= this.to)) {
      const half = (this.to - this.from) / 2;
      this.look(this.current - half, this.current + half);
    }
    if (this.shown) this.draw();
  }

  pick(row) {
    this.current = row;
    if (this.table.ops && this.table.ops[row].length) this.model.selectOp(this.table.ops[row][0]);
    this.draw();
  }

  // ---- drawing ----

  power(error) {
    if (!(error > 0)) return FLOOR;
    return clamp(Math.log10(error), FLOOR + 1, this.top);
  }

  x(row) {
    return EDGE.left + ((row + 0.5 - this.from) / (this.to - this.from)) * (this.canvas.clientWidth - EDGE.left - EDGE.right);
  }

  y(power) {
    const tall = this.canvas.clientHeight - EDGE.top - EDGE.bottom;
    return EDGE.top + (1 - (power - this.low) / (this.top - this.low)) * tall;
  }

  render() {
    if (!this.shown) return;
    const { canvas } = this;
    const ratio = window.devicePixelRatio || 1;
    const [wide, tall] = [canvas.clientWidth, canvas.clientHeight];
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(tall * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    pen.textBaseline = "middle";
    this.axes(pen, colour, wide, tall);
    const first = Math.max(0, Math.floor(this.from) - 1);
    const last = Math.min(this.errors.length, Math.ceil(this.to) + 1);
    pen.strokeStyle = colour("soft");
    pen.setLineDash([3, 3]);
    pen.beginPath();
    for (let row = first; row < last; row += 1) if (this.tolerances[row] > 0) pen.lineTo(this.x(row), this.y(this.power(this.tolerances[row])));
    pen.stroke();
    pen.setLineDash([]);
    const colours = { same: colour("k-other"), close: colour("k-product"), different: colour("k-loss") };
    for (let row = first; row < last; row += 1) this.point(pen, row, colours, colour);
    canvas.setAttribute("aria-label", this.spoken());
    canvas.dataset.from = this.from;
    canvas.dataset.to = this.to;
  }

  point(pen, row, colours, colour) {
    const { matches } = this.model;
    const error = this.errors[row];
    const [x, y] = [this.x(row), this.y(Number.isNaN(error) || error === Infinity ? this.top : this.power(error))];
    const ops = this.table.ops ? this.table.ops[row] : [];
    pen.globalAlpha = matches && !ops.some((op) => matches[op]) ? 0.15 : 0.9;
    pen.fillStyle = colours[this.verdicts[row]] || colours.same;
    pen.beginPath();
    pen.arc(x, y, row === this.current ? 5 : 3, 0, 2 * Math.PI);
    pen.fill();
    pen.globalAlpha = 1;
    if (row === this.current) {
      pen.strokeStyle = colour("accent");
      pen.lineWidth = 2;
      pen.beginPath();
      pen.arc(x, y, 7, 0, 2 * Math.PI);
      pen.stroke();
    }
  }

  axes(pen, colour, wide, tall) {
    pen.strokeStyle = colour("line");
    pen.lineWidth = 1;
    const line = (x1, y1, x2, y2) => {
      pen.beginPath();
      pen.moveTo(x1, y1);
      pen.lineTo(x2, y2);
      pen.stroke();
    };
    pen.textAlign = "right";
    for (let power = this.top; power > FLOOR + 2; power -= 3) {
      const y = Math.round(this.y(power)) + 0.5;
      line(EDGE.left, y, wide - EDGE.right, y);
      pen.fillStyle = colour("soft");
      pen.fillText(power === 0 ? "1" : `1e${power}`, EDGE.left - 8, y);
    }
    const ground = Math.round(this.y(FLOOR)) + 0.5;
    line(EDGE.left, ground, wide - EDGE.right, ground);
    pen.fillStyle = colour("soft");
    pen.fillText("equal", EDGE.left - 8, ground);
    pen.textAlign = "left";
    pen.fillText("relative error; dashes: tolerance", EDGE.left, EDGE.top / 2);
    this.phases.forEach((phase, row) => {
      if (row && phase === this.phases[row - 1]) return;
      const x = Math.round(this.x(row - 0.5)) + 0.5;
      if (x < EDGE.left - 1 || x > wide - EDGE.right) return;
      line(x, EDGE.top, x, tall - EDGE.bottom);
      pen.fillText(String(phase), x + 4, tall - EDGE.bottom / 2 + 2);
    });
  }

  spoken() {
    const count = (verdict) => this.verdicts.filter((one) => one === verdict).length;
    const all = `Relative error of ${plural(this.errors.length, "op")} in the order of execution: ${count("same")} same, ${count("close")} close, ${count("different")} different`;
    return this.current < 0 ? all : `${all}; selected: ${this.name(this.current)}, ${written(this.errors[this.current])}`;
  }

  // ---- moving ----

  rowAt(x) {
    const wide = this.canvas.clientWidth - EDGE.left - EDGE.right;
    const row = Math.floor(this.from + ((x - EDGE.left) / wide) * (this.to - this.from));
    return row >= 0 && row < this.errors.length && x >= EDGE.left ? row : -1;
  }

  // Of the rows under a few pixels the one that is nearest.
  nearest(x, y) {
    const [left, right] = [this.rowAt(Math.max(EDGE.left, x - 6)), this.rowAt(Math.min(x + 6, this.canvas.clientWidth - EDGE.right - 1))];
    let best = -1;
    let least = 400;
    for (let row = Math.max(0, left); row <= right; row += 1) {
      const away = (this.x(row) - x) ** 2 + (this.y(this.power(this.errors[row])) - y) ** 2;
      if (away < least) [best, least] = [row, away];
    }
    return best;
  }

  listen() {
    const { canvas } = this;
    let drag = null;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(Math.exp(event.deltaY * (event.deltaMode ? 0.05 : 0.002)), event.offsetX);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!drag) {
        this.hover(event);
        return;
      }
      const dx = event.clientX - drag.x;
      if (!drag.moved && Math.abs(dx) < 4) return;
      const step = (-dx / canvas.clientWidth) * (this.to - this.from);
      this.look(this.from + step, this.to + step);
      drag = { x: event.clientX, moved: true };
    });
    canvas.addEventListener("pointerup", (event) => {
      const row = drag && !drag.moved ? this.nearest(event.offsetX, event.offsetY) : -1;
      drag = null;
      if (row >= 0) this.pick(row);
    });
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step && this.errors.length) this.pick(clamp(this.current + step, 0, this.errors.length - 1));
      else if (event.key === "+" || event.key === "=") this.zoom(1 / 1.6);
      else if (event.key === "-") this.zoom(1.6);
      else if (event.key === "0") this.look(0, this.errors.length);
      else return;
      event.preventDefault();
    });
  }

  hover(event) {
    const row = this.nearest(event.offsetX, event.offsetY);
    this.tip.hidden = row < 0;
    if (row < 0) return;
    this.tip.replaceChildren(h("strong", {}, this.name(row)), ` ${written(this.errors[row])}`,
      h("div", { class: "soft" }, `${this.verdicts[row]}, tolerance ${written(this.tolerances[row])}`));
    this.tip.style.left = `${Math.max(0, Math.min(event.offsetX + 12, this.canvas.clientWidth - this.tip.offsetWidth - 4))}px`;
    this.tip.style.top = `${Math.min(event.offsetY + 14, this.canvas.clientHeight - this.tip.offsetHeight - 4)}px`;
  }
}
