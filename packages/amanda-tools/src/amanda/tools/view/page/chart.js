// A chart on a canvas, zoomed by the wheel and moved by dragging along one axis, on which the part from `from` to
// `to` of 0 to `all` is in sight.

const ZOOM = 1.6;

class Chart {
  // edge: pixels to the left and the right of the axis; least: the smallest part that is shown.
  constructor(model, element, tools, all, least, edge) {
    Object.assign(this, { model, element, tools, all, edge, shown: false, from: 0, to: all });
    this.least = Math.min(least, all);
    this.current = -1;  // what was clicked
    this.draw = eachFrame(() => this.render());
    model.on("selection", () => this.follow());
    model.on("search", () => { if (this.shown) this.draw(); });
  }

  show() {
    this.shown = true;
    this.canvas = h("canvas", { class: "chart", tabindex: 0, role: "img" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.element.replaceChildren(...this.parts());
    const button = (text, title, action) => h("button", { type: "button", title, "aria-label": title, onclick: action }, text);
    this.tools.replaceChildren(button("−", "Zoom out", () => this.zoom(ZOOM)), button("+", "Zoom in", () => this.zoom(1 / ZOOM)),
      button("Fit", `Fit: show ${this.whole}`, () => this.look(0, this.all)));
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
    if (this.watch) this.watch.disconnect();
    if (this.dark) this.dark.removeEventListener("change", this.draw);
    this.element.replaceChildren();
    this.tools.replaceChildren();
  }

  get width() { return Math.max(1, this.canvas.clientWidth - this.edge.left - this.edge.right); }

  x(at) { return this.edge.left + ((at - this.from) / (this.to - this.from)) * this.width; }

  at(x) { return this.from + ((x - this.edge.left) / this.width) * (this.to - this.from); }

  look(from, to) {
    const span = clamp(to - from, this.least, this.all);
    this.from = clamp(from, 0, this.all - span);
    this.to = this.from + span;
    if (this.shown) this.draw();
  }

  zoom(factor, x = this.canvas.clientWidth / 2) {
    const part = clamp((x - this.edge.left) / this.width, 0, 1);
    const at = this.from + part * (this.to - this.from);
    const span = clamp((this.to - this.from) * factor, this.least, this.all);
    this.look(at - part * span, at + (1 - part) * span);
  }

  slide(pixels) {
    const step = (pixels / this.width) * (this.to - this.from);
    this.look(this.from + step, this.to + step);
  }

  // The canvas in its present size, and the colours of the page.
  pen() {
    const { canvas } = this;
    const ratio = window.devicePixelRatio || 1;
    const [wide, tall] = [canvas.clientWidth, canvas.clientHeight];
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(tall * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const style = getComputedStyle(document.documentElement);
    const colours = new Map();
    this.colour = (name) => {
      if (!colours.has(name)) colours.set(name, style.getPropertyValue(`--${name}`).trim());
      return colours.get(name);
    };
    pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    pen.textBaseline = "middle";
    return [pen, wide, tall];
  }

  // ---- moving ----

  listen() {
    const { canvas } = this;
    let drag = null;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(Math.exp(event.deltaY * (event.deltaMode ? 0.05 : 0.002)), event.offsetX);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, y: event.clientY, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!drag) { this.hover(event); return; }
      const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
      if (!drag.moved && Math.hypot(dx, dy) < 4) return;
      this.slide(-dx);
      drag = { x: event.clientX, y: event.clientY, moved: true };
    });
    canvas.addEventListener("pointerup", (event) => {
      if (drag && !drag.moved) this.click(event.offsetX, event.offsetY);
      drag = null;
    });
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  // Tell what is selected to those who do not see it.
  speak() {
    const said = this.spoken();
    if (this.canvas.getAttribute("aria-label") === said) return;
    this.canvas.setAttribute("aria-label", said);
    if (this.current >= 0) $("said").textContent = said;
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      "+": () => this.zoom(1 / ZOOM), "=": () => this.zoom(1 / ZOOM), "-": () => this.zoom(ZOOM), 0: () => this.look(0, this.all),
      ArrowLeft: () => this.step(-1), ArrowRight: () => this.step(1),
    };
    if (!(event.key in actions)) return;
    actions[event.key]();
    event.preventDefault();
  }

  tell(event, ...content) {
    const { canvas, tip } = this;
    tip.hidden = !content.length;
    if (tip.hidden) return;
    tip.replaceChildren(...content);
    tip.style.left = `${Math.max(0, Math.min(event.offsetX + 12, canvas.clientWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.min(event.offsetY + 14, canvas.clientHeight - tip.offsetHeight - 4)}px`;
  }
}
