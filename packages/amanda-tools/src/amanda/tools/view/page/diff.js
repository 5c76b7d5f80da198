// How the error between two runs grows: a point for each op in the order of execution, by its relative error.

const FLOOR = -17;   // of the axis, a power of ten; below it lie those that are equal
const EDGE = { left: 56, right: 16, top: 28, bottom: 26 };

class DiffView extends Chart {
  constructor(model, table, element, tools) {
    super(model, element, tools, Math.max(1, table.rows.length), 4, EDGE);
    this.table = table;
    this.title = "Diff";
    this.whole = "all ops";
    const column = (name) => {
      const place = table.columns.findIndex((one) => one.name === name);
      return table.rows.map((row) => (place < 0 ? null : row[place]));
    };
    this.errors = column("relative error").map((value) => (value === null ? null : Number(value)));
    this.tolerances = column("tolerance").map((value) => (value === null ? null : Number(value)));
    this.verdicts = column("verdict");
    const phases = column("phase");
    this.passes = phases.flatMap((phase, row) => (row && phase === phases[row - 1] ? [] : [[phase, row]]));  // where each begins
    const count = (verdict) => this.verdicts.filter((one) => one === verdict).length;
    this.counts = `${count("same")} same, ${count("close")} close, ${count("different")} different`;
    const types = column("type");
    const modules = column("module");
    this.names = types.map((type, row) => {
      const ops = table.ops ? table.ops[row] : [];
      return [ops.length === 1 ? model.called(ops[0]) : String(type), modules[row]];
    });
    this.low = FLOOR;
    this.top = this.errors.reduce((top, error) => (Number.isFinite(error) && error > 0 ? Math.max(top, Math.ceil(Math.log10(error))) : top), 1);
  }

  parts() {
    this.canvas.classList.add("diff");
    return [h("div", { class: "verdict" }, this.links()), h("div", { class: "plot" }, this.canvas, this.tip)];
  }

  // The row of the first divergence of each pass that has one.
  get firsts() {
    return Object.entries(this.table.first || {}).filter(([, row]) => Number.isInteger(row) && row < this.names.length);
  }

  links() {
    if (!this.firsts.length) return [h("span", {}, "No op diverges")];
    return this.firsts.map(([phase, row]) => h("span", {}, h("span", { class: "soft" }, `First divergence, ${phase}: `),
      h("button", { type: "button", class: "link inline", onclick: () => this.pick(row) }, this.name(row)),
      ` relative error ${written(this.errors[row])}`));
  }

  name(row) {
    const [type, module] = this.names[row];
    return module ? `${type} in ${module}` : type;
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

  middle(row) { return this.x(row + 0.5); }

  y(power) {
    const tall = this.canvas.clientHeight - EDGE.top - EDGE.bottom;
    return EDGE.top + (1 - (power - this.low) / (this.top - this.low)) * tall;
  }

  render() {
    if (!this.shown) return;
    const { canvas } = this;
    const [pen, wide, tall] = this.pen();
    const { colour } = this;
    this.axes(pen, colour, wide, tall);
    const first = Math.max(0, Math.floor(this.from) - 1);
    const last = Math.min(this.errors.length, Math.ceil(this.to) + 1);
    pen.strokeStyle = colour("soft");
    pen.setLineDash([3, 3]);
    pen.beginPath();
    for (let row = first; row < last; row += 1) if (this.tolerances[row] > 0) pen.lineTo(this.middle(row), this.y(this.power(this.tolerances[row])));
    pen.stroke();
    pen.setLineDash([]);
    const colours = { same: colour("k-other"), close: colour("k-product"), different: colour("k-loss") };
    this.painted = new Set();
    for (let row = first; row < last; row += 1) this.point(pen, row, colours, colour);
    this.speak();
    canvas.dataset.from = this.from;
    canvas.dataset.to = this.to;
  }

  point(pen, row, colours, colour) {
    const { matches } = this.model;
    const error = this.errors[row];
    const [x, y] = [this.middle(row), this.y(Number.isNaN(error) || error === Infinity ? this.top : this.power(error))];
    const ops = this.table.ops ? this.table.ops[row] : [];
    const pixel = `${Math.round(x)} ${Math.round(y)} ${this.verdicts[row]}`;
    if (!matches && row !== this.current && this.painted.has(pixel)) return;
    this.painted.add(pixel);
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
    this.passes.forEach(([phase, row]) => {
      const x = Math.round(this.x(row)) + 0.5;
      if (x < EDGE.left - 1 || x > wide - EDGE.right) return;
      line(x, EDGE.top, x, tall - EDGE.bottom);
      pen.fillText(String(phase), x + 4, tall - EDGE.bottom / 2 + 2);
    });
  }

  spoken() {
    const all = `Relative error of ${plural(this.errors.length, "op")} in the order of execution: ${this.counts}`;
    return this.current < 0 ? all : `${all}; selected: ${this.name(this.current)}, ${written(this.errors[this.current])}`;
  }

  // ---- moving ----

  rowAt(x) {
    const row = Math.floor(this.at(x));
    return row >= 0 && row < this.errors.length && x >= EDGE.left ? row : -1;
  }

  // Of the rows under a few pixels the one that is nearest.
  nearest(x, y) {
    const [left, right] = [this.rowAt(Math.max(EDGE.left, x - 6)), this.rowAt(Math.min(x + 6, this.canvas.clientWidth - EDGE.right - 1))];
    let best = -1;
    let least = 400;
    for (let row = Math.max(0, left); row <= right; row += 1) {
      const away = (this.middle(row) - x) ** 2 + (this.y(this.power(this.errors[row])) - y) ** 2;
      if (away < least) [best, least] = [row, away];
    }
    return best;
  }

  click(x, y) {
    const row = this.nearest(x, y);
    if (row >= 0) this.pick(row);
  }

  step(direction) {
    if (this.errors.length) this.pick(clamp(this.current + direction, 0, this.errors.length - 1));
  }

  hover(event) {
    const row = this.nearest(event.offsetX, event.offsetY);
    this.tell(event, ...(row < 0 ? [] : [h("strong", {}, this.name(row)), ` ${written(this.errors[row])}`,
      h("div", { class: "soft" }, `${this.verdicts[row]}, tolerance ${written(this.tolerances[row])}`)]));
  }
}
