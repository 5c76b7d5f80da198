// Elements, and values as people read them. Text becomes text nodes alone: no markup is made of names.

const SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);

function fill(element, properties, children) {
  for (const [key, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) element.append(child);
  return element;
}

const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
const svg = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);

function clamp(value, low, high) {
  return Math.max(low, Math.min(high, value));
}

const grouping = new Intl.NumberFormat("en-US");
const grouped = (count) => grouping.format(count);

const PREFIXES = ["", "k", "M", "G", "T", "P", "E"];
const SECONDS = { s: 1, ms: 1e-3, us: 1e-6, "µs": 1e-6, ns: 1e-9 };

function digits(value) {
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(3);
  return String(Number(value.toPrecision(4)));
}

// A quantity with four digits and a prefix: 4.089 G.
function amount(value, unit = "") {
  let magnitude = value;
  let prefix = 0;
  while (Math.abs(magnitude) >= 999.95 && prefix < PREFIXES.length - 1) {
    magnitude /= 1000;
    prefix += 1;
  }
  return `${digits(magnitude)} ${PREFIXES[prefix]}${unit}`.trimEnd();
}

function duration(seconds) {
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  const [name, unit] = Object.entries(SECONDS).filter(([key]) => key !== "us")
    .find(([, one]) => size >= one * 0.99995) || ["ns", 1e-9];
  return `${digits(seconds / unit)} ${name}`;
}

function written(value, column = {}) {
  if (value === null || value === undefined) return "";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "object") return JSON.stringify(value);
  if (typeof value !== "number") return String(value);
  if (column.unit in SECONDS) return duration(value * SECONDS[column.unit]);
  if (column.unit === "share") return `${(100 * value).toFixed(1)} %`;
  if (column.unit || (column.large && Math.abs(value) >= 1000)) return amount(value, column.unit);
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return grouped(value);
  return Math.abs(value) >= 1e5 ? value.toExponential(3) : digits(value);
}

const shape = (extents) => (extents === null || extents === undefined ? "" :
  extents.length ? extents.map((one) => (one === null ? "?" : one)).join("×") : "scalar");

const plural = (count, word) => `${grouped(count)} ${word}${count === 1 ? "" : "s"}`;

// The end tells paths apart.
function ending(text, most) {
  return text.length <= most ? text : `…${text.slice(text.length - most + 1)}`;
}

function beginning(text, most) {
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}

// What kind of work an op does, for its colour.
const KINDS = [
  ["attention", /attention/],
  ["product", /conv|linear|matmul|addmm|addmv|baddbmm|bmm|einsum|lstm|gru$|gru_|rnn|dot$|embedding/],
  ["normalisation", /norm/],
  ["loss", /loss|cross_entropy/],
  ["pooling or reduction", /pool|^sum|^mean|^amax|^amin|^argm|^var|^std|^prod|^any|^all|cumsum|topk|logsumexp/],
  ["activation", /relu|gelu|silu|elu|sigmoid|tanh|softmax|softplus|softsign|mish|hardswish|hardtanh|dropout|swish/],
  ["shape", /reshape|view|permute|transpose|getitem|setitem|^cat|stack|split|chunk|expand|squeeze|flatten|select|slice|pad|tile|repeat|gather|scatter|clone|contiguous|copy|^to$|^to_|unbind|roll|index|identity|cast|^t$|narrow|unfold|shape/],
  ["elementwise", /add|sub|mul|div|pow|neg|abs|exp|log|sqrt|square|clamp|where|minimum|maximum|^eq|^ne|^lt|^le|^gt|^ge|bitwise|erf|sin|cos|reciprocal|remainder|round|floor|ceil|sign|lerp/],
];
const kindsKnown = new Map();
function kindOf(type) {
  if (!kindsKnown.has(type)) kindsKnown.set(type, findKind(type));
  return kindsKnown.get(type);
}

function findKind(type) {
  const word = type.toLowerCase().replace(/(_backward)+$/, "");
  if (word === "accumulate_grad") return "other";
  const found = KINDS.find(([, pattern]) => pattern.test(word));
  return found ? found[0] : "other";
}

const STAGES = ["product", "activation", "normalisation", "attention", "elementwise", "loss", "pooling", "other"];
const stageClass = (stage) => `k-${STAGES[stage % STAGES.length]}`;
const kindClass = (kind) => `k-${kind.split(" ")[0]}`;

// Pixels of a text in the font of the page, or in that of code.
const pen = document.createElement("canvas").getContext("2d");
const textWidths = new Map();
const digitWidths = new Map();
const fonts = { page: null, code: "ui-monospace, Menlo, Consolas, monospace" };
function textWidth(text, font, code) {
  const key = `${font}${code ? 1 : 0}${text}`;
  if (!textWidths.has(key)) {
    fonts.page = fonts.page || getComputedStyle(document.body).fontFamily;
    pen.font = `${font} ${code ? fonts.code : fonts.page}`;
    const others = String(text).replace(/\d/g, "");
    const digits = String(text).length - others.length;
    textWidths.set(key, Math.ceil(pen.measureText(others).width + digits * digitWidth(pen.font)));
  }
  return textWidths.get(key);
}

// The page has digits of one width, which a canvas cannot draw.
function digitWidth(font) {
  if (!digitWidths.has(font)) {
    const digit = h("span", {}, "0");
    digit.style.cssText = `position: absolute; font: ${font}; font-variant-numeric: tabular-nums`;
    document.body.append(digit);
    digitWidths.set(font, digit.getBoundingClientRect().width);
    digit.remove();
  }
  return digitWidths.get(font);
}

// Replaces only the rows that differ: a click is lost if its row is replaced between the press and the release.
function showRows(parent, rows) {
  rows.forEach((row, place) => {
    const present = parent.children[place];
    if (!present) parent.append(row);
    else if (!present.isEqualNode(row)) present.replaceWith(row);
  });
  while (parent.children.length > rows.length) parent.lastChild.remove();
}

// Keeps what changes often from being drawn more than once a frame.
function eachFrame(draw) {
  let due = false;
  return () => {
    if (due) return;
    due = true;
    requestAnimationFrame(() => { due = false; draw(); });
  };
}
