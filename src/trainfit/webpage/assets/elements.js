// Elements of the page. Text only ever becomes text: nothing here reads markup.

const SVG = "http://www.w3.org/2000/svg";

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children) {
    if (child !== null && child !== undefined) node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

const element = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);
const drawing = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

function button(label, action, attributes) {
  return element("button", { type: "button", onclick: action, ...attributes }, label);
}

// A row of buttons of which one is chosen.
function choice(label, options, chosen, act) {
  const buttons = options.map((option) =>
    button(option.label, () => choose(option.value), { "aria-pressed": String(option.value === chosen) }));
  const choose = (value) => {
    buttons.forEach((one, number) => one.setAttribute("aria-pressed", String(options[number].value === value)));
    act(value);
  };
  return element("div", { class: "tf-choice", role: "group", "aria-label": label }, ...buttons);
}

// A name may be of any length and in any direction; it is shown shortened, and whole where one asks for it.
function shortened(text, longest) {
  if (text.length <= longest) return text;
  const half = Math.floor((longest - 1) / 2);
  return `${text.slice(0, half)}…${text.slice(text.length - half)}`;
}

const named = (text, longest = 80) => element("bdi", text.length > longest ? { title: text.slice(0, 2000) } : {}, shortened(text, longest));

// The same where there is little room: long words may be broken after their signs.
const LONG_WORD = 24;
const namedInParts = (text, longest) => {
  const parts = shortened(text, longest).split(/(?<= )/).flatMap((word) => (word.length > LONG_WORD ? word.split(/(?<=[._])/) : [word]));
  return element("bdi", text.length > longest ? { title: text.slice(0, 2000) } : {}, ...parts.flatMap((part, number) => (number ? [element("wbr"), part] : [part])));
};

// Whether two boxes (left, top, width, height) cover each other.
const overlap = (one, other) => one[0] < other[0] + other[2] && other[0] < one[0] + one[2] && one[1] < other[1] + other[3] && other[1] < one[1] + one[3];

const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
